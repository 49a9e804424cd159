"""Saving a checkpoint whose leaves are computed or read while they are written.

Invariant: as for every save, all chunks are durable in packs before the manifest is created, which is
the commit. Only the chunk that is being written is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from perdure.errors import StepExistsError
from perdure.store.copy import refuse_same_place
from perdure.store.entry_builder import EntryBuilder
from perdure.store.format import MAX_STEP, chunk_spans, hash_bytes
from perdure.store.garbage_collection import PruneRequest
from perdure.store.leaf import Leaves, RemoteLeaf
from perdure.store.manifest import Container, LeafEntry, Manifest, RecipeValue
from perdure.store.pack_writer import BLOCK, NewPack, Written, new_pack
from perdure.store.run import Run
from perdure.store.storage import Storage


class StreamedLeaf(NamedTuple):
    """A leaf that is produced when it is written.

    `chunks` returns its bytes in parts of CHUNK_BYTES, each used before the next one is asked for,
    so that all may share one buffer. `text` is the text of a Python scalar.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[memoryview]]
    text: str | None = None


def text_leaf(path: str, dtype: str, text: str) -> StreamedLeaf:
    """The leaf of a Python scalar."""
    return StreamedLeaf(path, dtype, (), 0, lambda: iter(()), text)


def new_run(
    directory: str | os.PathLike[str] | Storage, made_from: str, apart_from: Iterable[Storage] = ()
) -> Run:
    """Become the writer of a new run directory, which must be empty or missing.

    What an interrupted call left is removed. Until the first commit no training begins there; its
    error says what the run is `made_from`. Raises StoreError (inside or around one of
    `apart_from`), NotARunError, StepExistsError, LockedError, SaveError.
    """
    run = Run(directory, create=True)
    run.log.made_from = made_from
    for other in apart_from:
        refuse_same_place(other, run.storage)
    if (steps := run.steps()) and run.log.begun_from != made_from:
        raise StepExistsError(
            f"{run.where}: expected an empty or missing directory, found a run with {len(steps)} "
            f"checkpoints, the newest of step {steps[-1]}. Nothing was changed. Name another directory."
        )
    run.delete(steps)
    run.execute(run.plan(PruneRequest(orphans_to=MAX_STEP)))
    return run


def pack_order(nbytes: int, path: str) -> tuple[bool, str]:
    """A sort key of leaves: whole blocks come first in the pack, to be read past the page cache."""
    return nbytes % BLOCK > 0, path


def save_streamed(
    run: Run,
    step: int,
    leaves: Sequence[StreamedLeaf],
    *,
    recipe: Mapping[str, RecipeValue] | None = None,
    containers: Mapping[str, Container] | None = None,
    process_leaves: Sequence[StreamedLeaf] = (),
) -> Manifest:
    """Commit one checkpoint to a `new_run`; it survives power loss on return.

    The chunks of `leaves` are asked for in this order. Process leaves, written last, are no part of
    the fingerprint. Raises as `Run.save`.
    """
    state = Leaves({leaf.path: _later(leaf) for leaf in leaves}, containers)  # type: ignore[arg-type]
    others = {leaf.path: _later(leaf) for leaf in process_leaves}
    builder = EntryBuilder()
    left = sum(leaf.nbytes for leaf in (*leaves, *process_leaves))
    with run.committer.prepare(step, state, others) as save:
        with new_pack(run.storage, step, 0, {}, left) as pack:
            entries = [_entry(pack, builder, leaf) for leaf in leaves]
            process_entries = [_entry(pack, builder, leaf) for leaf in process_leaves]
        for listed in (entries, process_entries):
            listed.sort(key=attrgetter("path"))
        packs = builder.packs(pack.size_of)
        written = Written(entries, packs, pack.located, process_entries)
        manifest = run.committer.commit(save, written, recipe)
    run.finish()
    return manifest


def _later(leaf: StreamedLeaf) -> RemoteLeaf:
    """What a save needs to know of a leaf before its bytes are there; no chunk has these hashes."""
    hashes = tuple(f"{leaf.path} {start}" for start, _ in chunk_spans(leaf.nbytes))
    return RemoteLeaf(leaf.dtype, leaf.shape, leaf.nbytes, hashes)


def _entry(pack: NewPack, builder: EntryBuilder, leaf: StreamedLeaf) -> LeafEntry:
    """Write the chunks of a leaf; returns its entry."""
    if leaf.text is not None:
        return LeafEntry(leaf.path, leaf.dtype, text=leaf.text)
    placed = []
    for data in leaf.chunks():
        digest = hash_bytes(data)
        placed.append((digest, pack.add(digest, data, len(data))))
    return builder.array(leaf.path, leaf.dtype, leaf.shape, leaf.nbytes, placed)
