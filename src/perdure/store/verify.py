"""The store checker: reads every byte of a run directory and says what is wrong with it.

Changes nothing. Tests call `check` as their last line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perdure.errors import CorruptionError, PerdureError, UnreachableError
from perdure.store.format import (
    MANIFESTS,
    PACKS,
    TRAILER_BYTES,
    Manifest,
    decode_pack_index,
    hash_bytes,
    index_span,
    step_of,
)
from perdure.store.run import Run


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what, and whether a checkpoint is lost by it."""

    name: str
    what: str
    harmful: bool = True


@dataclass(frozen=True)
class Report:
    """What a full check found."""

    where: str
    good: tuple[int, ...]
    bad: tuple[int, ...]
    chunks: int
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """True when nothing harmful was found."""
        return not any(problem.harmful for problem in self.problems)


def check(run: Run) -> Report:
    """Read and hash everything: manifests, packs, indexes; then compare them with each other.

    Harmful: a manifest or a pack that is not exactly what was committed, or is missing. Harmless
    and reported: leftovers of a crash, packs that no manifest needs, and what is in quarantine.
    Raises `UnreachableError` when the storage does not answer, which says nothing about its bytes.
    """
    problems: list[Problem] = []
    packs: dict[str, dict[int, tuple[str, int]]] = {}
    sizes: dict[str, int] = {}
    broken: set[str] = set()
    for name in sorted(run.storage.list(PACKS)):
        if name.endswith(".tmp"):
            continue
        pack = name.removeprefix(PACKS)
        try:
            sizes[pack] = run.storage.size(name)
            packs[pack] = dict(_read_pack(run, name, sizes[pack]))
        except ConnectionError as error:
            raise UnreachableError(f"{run.where}: the check stopped: {error}.") from error
        except (CorruptionError, OSError) as error:
            broken.add(pack)
            problems.append(Problem(name, str(error)))
    good, bad, manifests = [], [], []
    for step in run.steps():
        try:
            manifest = run.manifest(step)
            manifests.append(manifest)
            _match(run, manifest, packs, sizes, broken)
            good.append(step)
        except UnreachableError:
            raise
        except PerdureError as error:
            bad.append(step)
            problems.append(Problem(f"step {step}", str(error)))
    needed = {pack.name for manifest in manifests for pack in manifest.packs}
    if len(manifests) == len(good) + len(bad):
        problems += [
            Problem(
                PACKS + name, "no checkpoint needs this pack; the next writer may reuse it", False
            )
            for name in sorted(packs.keys() - needed)
        ]
    problems += [
        Problem(name, "left by a writer that did not finish", False) for name in run.leftovers()
    ]
    problems += [Problem(name, "in quarantine", False) for name in run.quarantined()]
    problems += [
        Problem(name, "not a manifest's name; remove it by hand", False)
        for name in sorted(run.storage.list(MANIFESTS))
        if step_of(name) is None and not name.endswith(".tmp")
    ]
    return Report(
        where=run.where,
        good=tuple(good),
        bad=tuple(bad),
        chunks=sum(map(len, packs.values())),
        nbytes=sum(sizes.values()),
        problems=tuple(problems),
    )


def _read_pack(run: Run, name: str, size: int) -> Iterator[tuple[int, tuple[str, int]]]:
    """(offset, (hash, length)) of every chunk of a pack, each one read and hashed."""
    where = f"{run.where}/{name}"
    trailer = _read(run, name, max(0, size - TRAILER_BYTES), min(size, TRAILER_BYTES))
    start, length = index_span(trailer, size, where)
    index = decode_pack_index(_read(run, name, start, length), trailer, start, where)
    at = 0
    for number, (digest, nbytes) in enumerate(index.chunks):
        found = hash_bytes(_read(run, name, at, nbytes))
        if found != digest:
            raise CorruptionError(
                f"{where}: chunk {number} at offset {at}: expected hash {digest}, found {found}."
            )
        yield at, (digest, nbytes)
        at += nbytes


def _read(run: Run, name: str, offset: int, length: int) -> bytes:
    target = bytearray(length)
    got = run.storage.read_into(name, offset, memoryview(target))
    if got != length:
        raise CorruptionError(
            f"{run.where}/{name}: expected {length} bytes at offset {offset}, found {got}."
        )
    return bytes(target)


def _match(
    run: Run,
    manifest: Manifest,
    packs: dict[str, dict[int, tuple[str, int]]],
    sizes: dict[str, int],
    broken: set[str],
) -> None:
    for pack in manifest.packs:
        if pack.name in broken:
            raise CorruptionError(
                f"{run.where}: step {manifest.step} needs {pack.name}, which is damaged."
            )
        if pack.name not in packs:
            raise CorruptionError(
                f"{run.where}: step {manifest.step} needs {pack.name}, which is missing."
            )
        if sizes[pack.name] != pack.size:
            raise CorruptionError(
                f"{run.where}: step {manifest.step} expects {pack.name} to have {pack.size} bytes, "
                f"found {sizes[pack.name]}."
            )
    for leaf in manifest.leaves:
        for chunk in leaf.chunks:
            name = manifest.packs[chunk.pack].name
            if packs[name].get(chunk.offset) != (chunk.hash, chunk.length):
                raise CorruptionError(
                    f"{run.where}: step {manifest.step}, leaf {leaf.path!r}: {name} holds another "
                    f"chunk at offset {chunk.offset}."
                )
