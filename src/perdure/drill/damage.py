"""Damage to the newest checkpoint between two attempts: what a disk does while nobody looks."""

from __future__ import annotations

from pathlib import Path

from perdure.store import Run
from perdure.store.format import MANIFESTS, PACKS, manifest_name, pack_step
from perdure.store.manifest import Manifest


def damage(runs: Path, how: str, place: float) -> str | None:
    """Damage the newest checkpoint of the fullest run directory below `runs`; says what was done.

    `how`: "flip" a bit of what its save wrote, "delete" the pack that it wrote. `place` is from 0 to
    1. None, and nothing done, where no older checkpoint is there to go on from.
    """
    held = [(run.steps(), run) for run in map(Run, _marked(runs))]
    steps, run = max(held, key=lambda each: len(each[0]), default=([], None))
    if run is None or len(steps) < 2:
        return None
    where, step = Path(run.where), steps[-1]
    manifest = run.manifest(step)
    own = [pack.name for pack in manifest.packs if pack_step(pack.name) == step]
    if how == "delete":
        if not own:
            return None
        name = own[int(place * len(own))]
        (where / PACKS / name).unlink()
        return f"{PACKS}{name} of step {step} deleted"
    spans = _spans(manifest, set(own))
    if spans:
        name, start, length = spans[int(place * len(spans))]
        at = start + int(place * length)
        name = PACKS + name
    else:  # nothing new was in that checkpoint but its manifest
        name = manifest_name(step)
        at = int(place * (where / name).stat().st_size)
    with (where / name).open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << int(place * 8)]))
    return f"a bit of byte {at} of {name} flipped (step {step})"


def _spans(manifest: Manifest, packs: set[str]) -> list[tuple[str, int, int]]:
    """Where the chunks lie that are read from `packs`: pack, offset, bytes."""
    names = [pack.name for pack in manifest.packs]
    return [
        (names[chunk.pack], chunk.offset, chunk.length)
        for leaf in manifest.leaves
        for chunk in leaf.chunks
        if names[chunk.pack] in packs and chunk.length
    ]


def _marked(runs: Path) -> list[Path]:
    return [path.parent for path in sorted(runs.glob(f"*/{MANIFESTS}")) if path.is_dir()]
