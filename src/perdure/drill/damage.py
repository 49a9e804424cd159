"""Damages the newest checkpoint between two attempts, as a failing disk would."""

from __future__ import annotations

from pathlib import Path

from perdure.store import Run
from perdure.store.format import MANIFESTS, PACKS, manifest_name, pack_step
from perdure.store.manifest import Manifest


def damage(runs: Path, how: str, place: float) -> str | None:
    """Damage the newest checkpoint of the run directory below `runs` that has the most checkpoints.

    Args:
        runs: The parent of the run directories.
        how: "flip" a bit of what the save of the checkpoint wrote, or "delete" its pack.
        place: Where in it, from 0 to 1.

    Returns:
        What was done, as text; None, with nothing done, if there is no older checkpoint.
    """
    marked = [path.parent for path in sorted(runs.glob(f"*/{MANIFESTS}")) if path.is_dir()]
    candidates = [(run.steps(), run) for run in map(Run, marked)]
    steps, run = max(candidates, key=lambda candidate: len(candidate[0]), default=([], None))
    if run is None or len(steps) < 2:
        return None
    directory, step = Path(run.where), steps[-1]
    manifest = run.manifest(step)
    packs = [pack.name for pack in manifest.packs if pack_step(pack.name) == step]
    if how == "delete":
        if not packs:
            return None
        name = packs[int(place * len(packs))]
        (directory / PACKS / name).unlink()
        return f"{PACKS}{name} of step {step} deleted"
    if how != "flip":
        raise ValueError(f"expected damage of kind 'flip' or 'delete', found {how!r}")
    spans = _spans(manifest, set(packs))
    if spans:
        name, start, length = spans[int(place * len(spans))]
        offset = start + int(place * length)
        name = PACKS + name
    else:  # the save wrote nothing but the manifest
        name = manifest_name(step)
        offset = int(place * (directory / name).stat().st_size)
    with (directory / name).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << int(place * 8)]))
    return f"a bit of byte {offset} of {name} flipped (step {step})"


def _spans(manifest: Manifest, packs: set[str]) -> list[tuple[str, int, int]]:
    """Pack, offset and length in bytes of the chunks that lie in `packs`."""
    names = [pack.name for pack in manifest.packs]
    return [
        (names[chunk.pack], chunk.offset, chunk.length)
        for leaf in manifest.leaves
        for chunk in leaf.chunks
        if names[chunk.pack] in packs and chunk.length
    ]
