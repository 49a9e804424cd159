"""Saving a checkpoint whose leaves are computed or read while they are written.

Invariant: as for every save, all chunks are durable in packs before the manifest is created, which is
the commit. Only the chunk that is being written is in memory.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from perdure.errors import LockedError, SaveError, StepExistsError
from perdure.store.copy import refuse_same_place
from perdure.store.entry_builder import EntryBuilder
from perdure.store.format import CHUNK_BYTES, FORMAT, MAX_STEP, hash_bytes, pack_name, time_text
from perdure.store.free_space import (
    BYTES_PER_CHUNK,
    BYTES_PER_LEAF,
    BYTES_PER_SAVE,
    ensure_free_bytes,
)
from perdure.store.garbage_collection import PruneRequest
from perdure.store.manifest import Container, LeafEntry, Manifest, RecipeValue
from perdure.store.manifest_check import checked_fingerprint
from perdure.store.pack_writer import BLOCK, NewPack
from perdure.store.run import Run
from perdure.store.storage import Storage


class StreamedLeaf(NamedTuple):
    """A leaf that is produced when it is written.

    Attributes:
        path, dtype, shape: As of a `Leaf`.
        nbytes: Bytes of the array.
        chunks: Returns the bytes of an array in parts of CHUNK_BYTES, the last one shorter. Each
            part is used before the next one is asked for, so that all may share one buffer.
        text: The text of a Python scalar, which has no chunks.
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


def new_run(directory: str | os.PathLike[str] | Storage, apart_from: Iterable[Storage] = ()) -> Run:
    """Become the writer of a new run directory, which must be empty or missing.

    What an earlier call left that was interrupted is removed.

    Raises:
        StoreError: `directory` is one of `apart_from`, or inside it or around it.
        NotARunError: `directory` holds other files.
        StepExistsError: `directory` holds checkpoints.
        LockedError, SaveError: As `Run.begin_writing`.
    """
    run = Run(directory, create=True)
    for other in apart_from:
        refuse_same_place(other, run.storage)
    if steps := run.steps():
        raise StepExistsError(
            f"{run.where}: expected an empty or missing directory, found a run with {len(steps)} "
            f"checkpoints, the newest of step {steps[-1]}. Nothing was changed. Name another directory."
        )
    run.begin_writing()
    run.execute(run.plan(PruneRequest(orphans_to=MAX_STEP)))
    return run


def pack_order(nbytes: int, path: str) -> tuple[bool, str]:
    """The key by which to sort the leaves of `save_streamed`: whole blocks come first in the pack.

    Their chunks then begin on a block and can be read past the page cache.
    """
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
    """Commit one checkpoint; it survives power loss on return.

    Args:
        run: From `new_run`.
        step: The step.
        leaves: The leaves of the state, with different paths. Their chunks are asked for in this order.
        recipe, containers: The fields of the manifest.
        process_leaves: Leaves that are no part of the fingerprint; they are written last.

    Returns:
        The manifest that is committed.

    Raises:
        LockedError: Another process committed the step meanwhile.
        SaveError: The run directory cannot be written to. Nothing was committed.
    """
    every = [*leaves, *process_leaves]
    try:
        pack, digests = _write_chunks(run, step, every)
        builder = EntryBuilder()
        entries = [
            _entry(leaf, hashes, builder, pack) for leaf, hashes in zip(every, digests, strict=True)
        ]
        own = tuple(sorted(entries[: len(leaves)], key=lambda entry: entry.path))
        others = tuple(sorted(entries[len(leaves) :], key=lambda entry: entry.path))
        packs = tuple(builder.packs(lambda _: pack.size))
        manifest = Manifest(
            format=FORMAT,
            step=step,
            created=time_text(time.time()),
            fingerprint=checked_fingerprint(packs, own, f"{run.where}: this save"),
            recipe=dict(recipe or {}),
            metrics={},
            packs=packs,
            leaves=own,
            containers=dict(containers or {}),
            process_leaves=others,
        )
        run.commit_manifest(manifest, pack.located)
        return manifest
    except FileExistsError as error:
        raise LockedError(
            f"{run.where}: step {step} was committed by another writer meanwhile ({error}). Nothing "
            f"was overwritten; name another directory."
        ) from error
    except OSError as error:
        raise SaveError(
            f"{run.where}: saving step {step} failed: {error}. Nothing was committed. Correct the "
            f"cause (free space, permissions, network), then repeat the call."
        ) from error


def _write_chunks(
    run: Run, step: int, leaves: Sequence[StreamedLeaf]
) -> tuple[NewPack, list[list[str]]]:
    """Write the chunks as one durable pack; returns it, and the hashes of each leaf."""
    left = sum(leaf.nbytes for leaf in leaves)
    chunks = left // CHUNK_BYTES + len(leaves)
    overhead = BYTES_PER_SAVE + BYTES_PER_LEAF * len(leaves) + BYTES_PER_CHUNK * chunks
    ensure_free_bytes(run.storage, left + overhead)
    pack = NewPack(run.storage, pack_name(step, 0, secrets.token_hex(4)), {})
    digests: list[list[str]] = []
    try:
        for leaf in leaves:
            digests.append([])
            for data in leaf.chunks():
                digest = hash_bytes(data)
                digests[-1].append(digest)
                pack.add(digest, data, left, len(data))
                left -= len(data)
        pack.finish()
    except BaseException:
        pack.abort()
        raise
    return pack, digests


def _entry(
    leaf: StreamedLeaf, digests: list[str], builder: EntryBuilder, pack: NewPack
) -> LeafEntry:
    if leaf.text is not None:
        return LeafEntry(leaf.path, leaf.dtype, text=leaf.text)
    placed = [(digest, pack.located[digest]) for digest in digests]
    return builder.array(leaf.path, leaf.dtype, leaf.shape, leaf.nbytes, placed)
