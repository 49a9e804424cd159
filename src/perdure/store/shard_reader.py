"""Reads what one of several processes needs: only the chunks in which it has elements, each verified.

A chunk that lies in one shard is read into it; others pass through the memory of a few chunks. The
processes of one machine divide what several of them need (`SharedReads`), and large arrays that each
has whole. Without that, chunks that lie in several shards are read through the page cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple, Protocol

from perdure.store.aligned_buffers import (
    SMALL_BYTES,
    copy_bytes,
    give_buffer,
    leaf_memory,
    take_buffer,
)
from perdure.store.format import CHUNK_BYTES, PACKS, batches, chunk_spans
from perdure.store.leaf import Leaf
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.pools import map_ahead
from perdure.store.reader import (
    READ_THREADS,
    grouped,
    load_chunks,
    no_memory,
    require_packs,
    step_text,
    verified,
    wanted_chunk,
)
from perdure.store.shard_plan import (
    Region,
    RegionIndex,
    Shards,
    place_elements,
    slices_size,
    volume,
)
from perdure.store.storage import Storage

MOST_STREAMS = 8
"""Of chunks that do not lie in one shard; each takes a buffer."""

Regions = Mapping[str, tuple[Region, ...]]
"""The regions that this process needs, by the path of the array."""


class SharedReads(Protocol):
    """Divides chunks that contain elements for several processes of this machine."""

    def announce(
        self,
        fingerprint: str,
        wanted: Mapping[int, int],
        alone: int,
        place: Callable[[int, memoryview], None],
    ) -> bool:
        """Ask the other processes to share what is `wanted` (bytes by number); False if there are
        none.

        `place` is called in any thread with number and verified bytes of a chunk that another
        process has read; `alone` are bytes that this process reads besides.
        """
        ...

    def divide(self) -> tuple[set[int], set[int]]:
        """The numbers of chunks that others read, and of chunks that this process reads for others;
        waits until all have announced theirs."""
        ...

    def take(self) -> tuple[int, memoryview]:
        """A free slot and its memory, of CHUNK_BYTES."""
        ...

    def give(self, slot: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Hand verified chunks in a slot to the others: (number, place in the slot, bytes)."""
        ...

    def finish(self) -> set[int]:
        """Wait until all have their shared chunks; returns the numbers of the chunks that came."""
        ...

    def close(self) -> None:
        """End all sharing. Nothing calls `place` afterwards. May be called twice."""
        ...


class _Needed(NamedTuple):
    """A chunk of `nbytes` bytes, by its number. All of them belong into `target`, or without one
    `place` copies the elements that are needed; `is_shared` if other processes need some, too."""

    number: int
    entry: LeafEntry
    chunk: Chunk
    nbytes: int
    place: Callable[[memoryview], None]
    target: memoryview | None
    is_shared: bool


def load_shards(
    storage: Storage,
    manifest: Manifest,
    entries: Sequence[LeafEntry],
    regions: Regions,
    sharing: SharedReads | None = None,
) -> dict[str, Leaf]:
    """Read and verify the `regions` of some arrays of `manifest`, and others whole; raises as
    `load_leaves` does."""
    leaf_counts = [len(leaf.chunks) for leaf in manifest.leaves]
    paths = [leaf.path for leaf in manifest.leaves]
    firsts = dict(zip(paths, accumulate(leaf_counts, initial=0), strict=False))
    leaves: dict[str, Leaf] = {}
    needed: list[_Needed] = []
    require_packs(storage, manifest, entries)
    for entry in entries:
        chunks = zip(count(firsts[entry.path]), entry.chunks, chunk_spans(entry.nbytes))
        try:
            if entry.path in regions:
                shards = _new_shards(entry, tuple(dict.fromkeys(regions[entry.path])))
                data = memoryview(b"")
            else:
                shards, data = None, leaf_memory(entry.nbytes)
        except (MemoryError, OSError) as error:
            raise no_memory(storage, manifest, entry, error) from error
        leaves[entry.path] = Leaf(entry.dtype, entry.shape, data, frozen=True, shards=shards)
        if shards is None:
            for number, chunk, (start, stop) in chunks:
                target = data[start:stop]
                place = partial(copy_bytes, target)
                needed.append(_Needed(number, entry, chunk, stop - start, place, target, True))
            continue
        index = RegionIndex(shards.shape, shards.itemsize, shards.regions)
        for number, chunk, (start, stop) in chunks:
            if not (slices := index.slices(start, stop)):
                continue
            nbytes, target = stop - start, shards.inside(slices, start, stop)
            is_shared = nbytes >= SMALL_BYTES and slices_size(slices, shards.itemsize) < nbytes
            place = partial(place_elements, shards=shards, slices=slices)
            needed.append(_Needed(number, entry, chunk, nbytes, place, target, is_shared))
    if sharing is not None:
        with closing(sharing):
            if _read_shared(storage, manifest, needed, sharing):
                return leaves
    _read_alone(storage, manifest, needed)
    return leaves


def _new_shards(entry: LeafEntry, regions: tuple[Region, ...]) -> Shards:
    itemsize = entry.nbytes // max(1, math.prod(entry.shape))
    parts = tuple(leaf_memory(volume(region) * itemsize) for region in regions)
    return Shards(entry.shape, itemsize, regions, parts)


def is_large(entry: LeafEntry) -> bool:
    """Whether to share an array that each process has whole: a small one costs more to hand out."""
    return entry.text is None and entry.nbytes >= SMALL_BYTES


def _read_alone(storage: Storage, manifest: Manifest, needed: Sequence[_Needed]) -> None:
    in_place = [
        wanted_chunk(manifest, item.entry, item.chunk, item.target)
        for item in needed
        if item.target is not None
    ]
    load_chunks(storage, manifest, in_place)
    _pass_through(storage, manifest, [item for item in needed if item.target is None])


def _read_shared(
    storage: Storage, manifest: Manifest, needed: Sequence[_Needed], sharing: SharedReads
) -> bool:
    """Read what this process needs, a part in others; False, without a read, if none share."""
    shared = {item.number: item for item in needed if item.is_shared}
    alone = [item for item in needed if not item.is_shared]

    def place(number: int, data: memoryview) -> None:
        shared[number].place(data)

    wanted = {number: item.nbytes for number, item in shared.items()}
    size = sum(item.nbytes for item in alone)
    if not sharing.announce(manifest.fingerprint, wanted, size, place):
        return False
    _read_alone(storage, manifest, alone)
    theirs, given = sharing.divide()
    _pass_through(storage, manifest, [shared[number] for number in given], sharing)
    own = shared.keys() - theirs - given
    _read_alone(storage, manifest, [shared[number]._replace(is_shared=False) for number in own])
    missing = theirs - sharing.finish()
    _read_alone(storage, manifest, [shared[number] for number in missing])
    return True


def _pass_through(
    storage: Storage,
    manifest: Manifest,
    needed: Sequence[_Needed],
    sharing: SharedReads | None = None,
) -> None:
    """Read and verify chunks in their target or in the memory of a few, copy what is needed of these,
    and hand all to the other processes that need some.

    No chunk is read into the memory that others map: it is in ordinary pages, and a disk took twice
    the time for these as for huge ones.
    """
    if not needed:
        return
    threads = min(storage.streams, MOST_STREAMS) or READ_THREADS

    def work(batch: Sequence[_Needed]) -> None:
        buffer = take_buffer()
        try:
            starts = accumulate([item.nbytes for item in batch], initial=0)
            parts = [
                item.target or memoryview(buffer)[start : start + item.nbytes]
                for item, start in zip(batch, starts, strict=False)
            ]
            wanted = [
                wanted_chunk(manifest, item.entry, item.chunk, data)
                for item, data in zip(batch, parts, strict=True)
            ]
            if sharing is None:
                for item, chunk in zip(batch, wanted, strict=True):
                    if item.is_shared:
                        storage.keep_cached(PACKS + chunk.pack, chunk.offset)
            for read in grouped(step_text(storage, manifest), wanted):
                verified(storage, read)
            for item, data in zip(batch, parts, strict=True):
                if item.target is None:
                    item.place(data)
            if sharing is not None:
                hand_out(sharing, batch, parts)
        finally:
            give_buffer(buffer)

    def hand_out(
        sharing: SharedReads, batch: Sequence[_Needed], parts: Sequence[memoryview]
    ) -> None:
        slot, memory = sharing.take()
        start = 0
        offsets: list[tuple[int, int, int]] = []
        for item, data in zip(batch, parts, strict=True):
            copy_bytes(memory[start:], data)
            offsets.append((item.number, start, item.nbytes))
            start += item.nbytes
        sharing.give(slot, offsets)

    # In the order of the packs, small ones together.
    in_order = sorted(needed, key=lambda item: (item.chunk.pack, item.chunk.offset))
    together = batches(in_order, lambda item: item.nbytes, CHUNK_BYTES)
    # Threads of its own: they wait for other processes, and no other restore may wait for them.
    with ThreadPoolExecutor(threads, thread_name_prefix="perdure-read") as readers:
        for _ in map_ahead(readers, work, together, 2 * threads):
            pass
