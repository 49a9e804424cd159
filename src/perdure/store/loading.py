"""Reading the checkpoints of a run: their list, their manifests, and all or some of their leaves.

Readers take no lock and change nothing. A prune may run meanwhile: chunks that it moved are read from
their new places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from perdure.errors import CorruptionError, HistoryError, LeafNotFoundError, StepNotFoundError
from perdure.store.directory import Directory
from perdure.store.failures import read_error, reading
from perdure.store.format import CHUNK_BYTES, QUARANTINE, batches, manifest_name, steps_text
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.store.names import committed_steps, pinned_steps, step_aside
from perdure.store.pools import map_ahead, pool
from perdure.store.reader import (
    READ_THREADS,
    chunk_size,
    grouped,
    load_entries,
    new_bytes,
    step_text,
    verified,
    verify_leaves,
    wanted_chunk,
)
from perdure.store.run_log import LogView
from perdure.store.run_marker import other_run
from perdure.store.selection import WantedLeaves, held_instead
from perdure.store.shard_plan import Region
from perdure.store.shard_reader import SharedReads, is_large, load_shards
from perdure.store.storage import Storage, confirmed
from perdure.text import quoted


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint; `skipped` are (step, reason) of newer ones that are damaged."""

    manifest: Manifest
    leaves: Leaves
    skipped: tuple[tuple[int, str], ...] = ()
    process_leaves: dict[str, Leaf] = field(default_factory=dict)


def list_steps(storage: Storage) -> list[int]:
    """Committed steps, oldest first; raises `UnreachableError` if they cannot be listed."""
    with reading(f"{storage.where}: the list of its checkpoints"):
        return committed_steps(storage)


def list_pins(storage: Storage, log: LogView) -> frozenset[int]:
    """Pinned steps, by the folder or by the log; raises `UnreachableError` if they cannot be listed."""
    with reading(f"{storage.where}: the list of its pins"):
        return pinned_steps(storage) | log.pinned


def read_manifest(storage: Storage, step: int, run: str | None) -> Manifest:
    """The checked manifest of `step`, of the run with the id `run` (None for any).

    Raises HistoryError (another run's), StepNotFoundError, CorruptionError or UnreachableError.
    """
    name = manifest_name(step)
    where = f"{storage.where}/{name}"
    try:
        manifest = confirmed(
            storage, name, lambda: decode_manifest(storage.read(name), where, step)
        )
    except FileNotFoundError:
        raise StepNotFoundError(_no_such_step(storage, step)) from None
    except (OSError, MemoryError) as error:
        raise read_error(error, f"{storage.where}: step {step}: {name}") from error
    if (problem := other_run(manifest, run, where)) is not None:
        raise HistoryError(f"{problem} Nothing was changed.")
    return manifest


class ReadRequest(NamedTuple):
    """The part of a checkpoint to read: the paths that `wanted` accepts, of some arrays only `regions`.

    With `verifies_all` the other chunks of these arrays are verified, too; `sharing` reads together
    with other processes of this machine. With `wanted` the process leaves are left out, unless
    `has_process_leaves`.
    """

    wanted: Callable[[str], bool] | None = None
    regions: Callable[[Manifest], Mapping[str, tuple[Region, ...]]] | None = None
    verifies_all: bool = False
    sharing: SharedReads | None = None
    has_process_leaves: bool = False


EVERYTHING = ReadRequest()


def load_leaves(storage: Storage, manifest: Manifest, needs: ReadRequest) -> Leaves:
    """Read and verify the leaves of a manifest that are needed.

    Raises CorruptionError (with leaf, pack and offset), UnreachableError, or LeafNotFoundError if
    no leaf is wanted and the process leaves are not, either.
    """
    wanted = needs.wanted
    regions = {} if needs.regions is None else needs.regions(manifest)
    if regions and needs.verifies_all:
        verify_leaves(storage, manifest, wanted)
    entries = [leaf for leaf in manifest.leaves if wanted is None or wanted(leaf.path)]
    if wanted is not None and not entries and not needs.has_process_leaves:
        asked, text = (
            (wanted.asked, f" ({wanted.text})") if isinstance(wanted, WantedLeaves) else ((), "")
        )
        raise LeafNotFoundError(
            f"{storage.where}: step {manifest.step} has no leaf that was asked for{text}; it has "
            f"{held_instead([leaf.path for leaf in manifest.leaves], asked)} Nothing was changed."
        )
    leaves = Leaves(
        containers={
            path: container
            for path, container in manifest.containers.items()
            if wanted is None or wanted(path)
        }
    )
    together: dict[str, LeafEntry] = {
        leaf.path: leaf
        for leaf in entries
        if leaf.path in regions or (needs.sharing is not None and is_large(leaf))
    }
    alone = [leaf for leaf in entries if leaf.path not in together]
    with gc_paused(len(alone)):
        leaves.update(load_entries(storage, manifest, alone))
    if together:
        parts = list(together.values())
        loaded = load_shards(storage, manifest, parts, regions, needs.sharing) | leaves
        leaves.update({leaf.path: loaded[leaf.path] for leaf in entries})
    return leaves


def load_step(directory: Directory, step: int, needs: ReadRequest = EVERYTHING) -> Loaded:
    """Read and verify what is needed of one checkpoint; damage is noted in `directory`."""
    storage = directory.storage
    manifest = read_manifest(storage, step, directory.log.run)
    while True:
        try:
            leaves = load_leaves(storage, manifest, needs)
            is_whole = needs.wanted is None or needs.has_process_leaves
            entries = manifest.process_leaves if is_whole else ()
            process_leaves = load_entries(storage, manifest, entries)
            directory.loaded.add(step)
            return Loaded(manifest, leaves, process_leaves=process_leaves)
        except CorruptionError as error:
            # A prune may have moved the chunks since the manifest was read; then it has changed.
            renewed = read_manifest(storage, step, manifest.run)
            if renewed == manifest:
                directory.distrust(error)
                raise
            manifest = renewed


ChunkNumber = tuple[LeafEntry, int]
"""A leaf, and the number of one of its chunks."""


def stream_chunks(
    storage: Storage,
    manifest: Manifest,
    chunks: Iterable[ChunkNumber],
    *,
    ahead: int | None = None,
) -> Iterator[memoryview]:
    """Yield the decoded bytes of `chunks` (leaf, number) in order, reading a few ahead.

    Each has memory of its own, which the caller may keep. `ahead` is how many reads are under way.
    Raises CorruptionError (with leaf, pack and offset), StepNotFoundError or UnreachableError.
    """
    threads = ahead or storage.streams or READ_THREADS
    read = partial(_streamed, storage, manifest)
    together = batches(chunks, lambda chunk: chunk_size(*chunk), CHUNK_BYTES)
    with closing(map_ahead(pool("read", threads), read, together, threads)) as read_ahead:
        for batch in read_ahead:
            yield from batch


def _streamed(
    storage: Storage, manifest: Manifest, batch: Sequence[ChunkNumber]
) -> list[memoryview]:
    """The verified bytes of each chunk of a batch."""
    data = [new_bytes(chunk_size(entry, number)) for entry, number in batch]
    chunks = [(entry, entry.chunks[number]) for entry, number in batch]
    while True:
        try:
            wanted = [
                wanted_chunk(manifest, entry, chunk, target)
                for (entry, chunk), target in zip(chunks, data, strict=True)
            ]
            wanted.sort(key=attrgetter("pack", "offset"))
            for read in grouped(step_text(storage, manifest), wanted):
                verified(storage, read)
            return data
        except CorruptionError:
            # A prune may have moved the chunks since the manifest was read; then it has changed.
            renewed = read_manifest(storage, manifest.step, manifest.run)
            if renewed == manifest or renewed.fingerprint != manifest.fingerprint:
                raise
            manifest = renewed
            places = {chunk.hash: chunk for leaf in renewed.every_leaf() for chunk in leaf.chunks}
            chunks = [(entry, places[chunk.hash]) for entry, chunk in chunks]


def _no_such_step(storage: Storage, step: int) -> str:
    steps = list_steps(storage)
    noun = "step" if len(steps) == 1 else "steps"
    present = f"{noun} {steps_text(steps)}" if steps else "no checkpoint"
    message = f"{storage.where}: expected a checkpoint of step {step}, found {present}. "
    aside = LogView.read(storage)
    with reading(f"{storage.where}: the list of its quarantine"):
        names = filter(aside.is_rolled_back, storage.list(QUARANTINE))
        is_rolled_back = step in map(step_aside, names)
    if is_rolled_back:
        return message + (
            f"Step {step} was set aside by a rollback; `perdure rollback {quoted(storage.where)} "
            f"--undo` brings it back."
        )
    if not steps:
        return message + "Save one first, or name another run directory."
    nearest = min(steps, key=lambda other: (abs(other - step), -other))
    return message + f"Ask for one of those; the nearest is step {nearest}."
