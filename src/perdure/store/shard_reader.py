"""Reads what one of several processes needs: only the chunks in which it has elements, each verified.

A chunk that lies in one shard is read into it; others pass through the memory of a few chunks. The
processes of one machine divide what several of them need (`SharedReads`), and large arrays that each
has whole. Without that, chunks that lie in several shards are read through the page cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from perdure.store.aligned_buffers import SMALL_BYTES, give_buffer, leaf_memory, take_buffer
from perdure.store.format import CHUNK_BYTES, PACKS, batches, chunk_spans
from perdure.store.leaf import Leaf
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.pools import map_ahead
from perdure.store.reader import (
    READ_THREADS,
    Wanted,
    grouped,
    load_chunks,
    load_entries,
    no_memory,
    of_step,
    require_packs,
    verified,
    wanted_chunk,
)
from perdure.store.shard_plan import (
    Region,
    RegionIndex,
    Shards,
    Slice,
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
    """Divides chunks of which several processes of this machine need elements, and arrays that they
    need whole, whose numbers are below 0."""

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

    def divide(self) -> set[int]:
        """The numbers of what others read; waits until all have announced theirs."""
        ...

    def take(self) -> tuple[int, memoryview]:
        """A free slot and its memory, of CHUNK_BYTES."""
        ...

    def give(self, slot: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Hand verified chunks in a slot to the others: (number, place in the slot, bytes)."""
        ...

    def room(self, sizes: Mapping[int, int]) -> dict[int, memoryview]:
        """Memory for the whole arrays that this process reads (bytes by number). Called once; raises
        `OSError` if there is none."""
        ...

    def give_whole(self) -> None:
        """Hand out the arrays in that memory, which are verified and not written again."""
        ...

    def whole(self, number: int) -> memoryview:
        """The memory of a whole array that this or another process has read. Its changes are seen by
        nobody else."""
        ...

    def finish(self) -> set[int]:
        """Wait until all have what they share; returns the numbers of what came."""
        ...

    def close(self) -> None:
        """End all sharing. Nothing calls `place` afterwards. May be called twice."""
        ...


class _Passing(NamedTuple):
    """A chunk of `nbytes` bytes, by its number, of which some elements belong into shards."""

    number: int
    entry: LeafEntry
    chunk: Chunk
    nbytes: int
    shards: Shards
    slices: Sequence[Slice]

    def is_shared(self) -> bool:
        """Whether other processes need elements of it, too, and it is large."""
        is_needed = slices_size(self.slices, self.shards.itemsize) < self.nbytes
        return is_needed and self.nbytes >= SMALL_BYTES


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
    in_place: list[Wanted] = []
    passing: list[_Passing] = []
    whole: dict[int, LeafEntry] = {}
    require_packs(storage, manifest, entries)
    places = {path: place for place, path in enumerate(paths)}
    for entry in entries:
        if entry.path not in regions:
            whole[-1 - places[entry.path]] = entry
            continue
        shape, itemsize = entry.shape, entry.nbytes // max(1, math.prod(entry.shape))
        wanted = tuple(dict.fromkeys(regions[entry.path]))
        try:
            parts = tuple(leaf_memory(volume(region) * itemsize) for region in wanted)
        except (MemoryError, OSError) as error:
            raise no_memory(storage, manifest, entry, error) from error
        shards = Shards(shape, itemsize, wanted, parts)
        leaves[entry.path] = Leaf(
            entry.dtype, entry.shape, memoryview(b""), frozen=True, shards=shards
        )
        index = RegionIndex(shards.shape, itemsize, wanted)
        for number, (start, stop) in enumerate(chunk_spans(entry.nbytes)):
            if not (slices := index.slices(start, stop)):
                continue
            chunk = entry.chunks[number]
            if (target := shards.inside(slices, start, stop)) is not None:
                in_place.append(wanted_chunk(manifest, entry, chunk, target))
            else:
                place = firsts[entry.path] + number
                passing.append(_Passing(place, entry, chunk, stop - start, shards, slices))
    if sharing is not None:
        with closing(sharing):
            shared = _read_shared(storage, manifest, in_place, passing, whole, sharing)
        if shared is not None:
            return leaves | shared
    leaves |= load_entries(storage, manifest, [*whole.values()])
    load_chunks(storage, manifest, in_place)
    _pass_through(storage, manifest, passing)
    return leaves


def _chunks_of(manifest: Manifest, entry: LeafEntry, data: memoryview) -> Iterator[Wanted]:
    for chunk, (start, stop) in zip(entry.chunks, chunk_spans(entry.nbytes), strict=True):
        yield wanted_chunk(manifest, entry, chunk, data[start:stop])


def is_large(entry: LeafEntry) -> bool:
    """Whether to share an array that each process has whole: a small one costs more to hand out."""
    return entry.text is None and entry.nbytes >= SMALL_BYTES


def _read_shared(
    storage: Storage,
    manifest: Manifest,
    in_place: list[Wanted],
    passing: Sequence[_Passing],
    whole: Mapping[int, LeafEntry],
    sharing: SharedReads,
) -> dict[str, Leaf] | None:
    """Read what this process needs, a part in others, and return the arrays that it needs whole; None,
    without a read, if none share."""
    shared = {item.number: item for item in passing if item.is_shared()}
    alone = sum(chunk.size for chunk in in_place)
    alone += sum(item.nbytes for item in passing if item.number not in shared)

    def place(number: int, data: memoryview) -> None:
        place_elements(data, shared[number].shards, shared[number].slices)

    wanted = {number: item.nbytes for number, item in shared.items()}
    wanted |= {number: entry.nbytes for number, entry in whole.items()}
    if not sharing.announce(manifest.fingerprint, wanted, alone, place):
        return None
    load_chunks(storage, manifest, in_place)
    theirs = sharing.divide()
    mine = {number: entry for number, entry in whole.items() if number not in theirs}
    if mine:
        try:
            room = sharing.room({number: entry.nbytes for number, entry in mine.items()})
        except (MemoryError, OSError) as error:
            raise no_memory(storage, manifest, next(iter(mine.values())), error) from error
        chunks = [
            chunk for n, entry in mine.items() for chunk in _chunks_of(manifest, entry, room[n])
        ]
        load_chunks(storage, manifest, chunks)
        sharing.give_whole()
    chunks_of_mine = [item for item in passing if item.number not in theirs]
    _pass_through(storage, manifest, chunks_of_mine, sharing)
    missing = theirs - sharing.finish()
    _pass_through(storage, manifest, [shared[number] for number in missing if number >= 0])
    lost = [whole[number] for number in missing if number < 0]
    leaves = load_entries(storage, manifest, lost)
    for number, entry in whole.items():
        if entry.path not in leaves:
            data = sharing.whole(number)
            leaves[entry.path] = Leaf(entry.dtype, entry.shape, data, frozen=True)
    return leaves


def _pass_through(
    storage: Storage,
    manifest: Manifest,
    passing: Sequence[_Passing],
    sharing: SharedReads | None = None,
) -> None:
    """Read and verify chunks in the memory of a few, and copy their elements into the shards."""
    if not passing:
        return
    threads = min(storage.streams, MOST_STREAMS) or READ_THREADS

    def work(batch: Sequence[_Passing]) -> None:
        buffer, slot = None, 0
        if sharing is None:
            buffer = take_buffer()
            memory = memoryview(buffer)
        else:
            slot, memory = sharing.take()
        starts = list(accumulate([item.nbytes for item in batch], initial=0))
        parts = [memory[start:stop] for start, stop in pairwise(starts)]
        done: list[tuple[int, int, int]] = []
        try:
            wanted = [
                wanted_chunk(manifest, item.entry, item.chunk, data)
                for item, data in zip(batch, parts, strict=True)
            ]
            if sharing is None:
                for item, chunk in zip(batch, wanted, strict=True):
                    if item.is_shared():
                        storage.keep_cached(PACKS + chunk.pack, chunk.offset)
            for read in grouped(of_step(storage, manifest), wanted):
                verified(storage, read)
            for item, data in zip(batch, parts, strict=True):
                place_elements(data, item.shards, item.slices)
            done = [
                (item.number, start, item.nbytes)
                for item, start in zip(batch, starts, strict=False)
            ]
        finally:
            if buffer is not None:
                give_buffer(buffer)
            elif sharing is not None:
                sharing.give(slot, done)

    # In the order of the packs, small ones together.
    in_order = sorted(passing, key=lambda item: (item.chunk.pack, item.chunk.offset))
    together = batches(in_order, lambda item: item.nbytes, CHUNK_BYTES)
    # Threads of its own: they wait for other processes, and no other restore may wait for them.
    with ThreadPoolExecutor(threads, thread_name_prefix="perdure-read") as readers:
        for _ in map_ahead(readers, work, together, 2 * threads):
            pass
