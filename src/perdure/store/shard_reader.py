"""Reads the shards of one process: only the chunks in which they have elements, each verified.

A chunk that lies in one shard is read into it; others pass through the memory of a few chunks. Of
those, the processes of one machine divide what several of them need (`SharedReads`). Without that, such
chunks are read through the page cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from perdure.store.aligned_buffers import SMALL_BYTES, give_buffer, leaf_memory, take_buffer
from perdure.store.failures import read_error
from perdure.store.format import CHUNK_BYTES, PACKS, chunk_spans
from perdure.store.json_blocks import batches
from perdure.store.leaf import Leaf
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.pools import map_ahead
from perdure.store.reader import (
    READ_THREADS,
    fetch_reads,
    grouped_reads,
    read_parts,
    require_packs,
)
from perdure.store.shard_chunks import Shards, place_elements
from perdure.store.shard_plan import Region, RegionIndex, Slice, first_element, volume
from perdure.store.storage import PageCachedStorage, Storage, StreamingStorage

MOST_STREAMS = 8
"""Of chunks that do not lie in one shard; each takes a buffer."""

Regions = Mapping[str, tuple[Region, ...]]
"""The regions that this process needs, by the path of the array."""


class SharedReads(Protocol):
    """Divides chunks of which several processes of this machine need elements."""

    def announce(
        self,
        fingerprint: str,
        wanted: Mapping[int, int],
        alone: int,
        place: Callable[[int, memoryview], None],
    ) -> bool:
        """Ask the other processes to share chunks; False if there are none.

        Args:
            fingerprint: That of the manifest.
            wanted: The bytes of each chunk, by its number in the manifest.
            alone: Bytes that this process reads besides these.
            place: Called in any thread with the number and the verified bytes of a chunk that another
                process has read.
        """
        ...

    def divide(self) -> set[int]:
        """The numbers of the chunks that others read; waits until all have announced theirs."""
        ...

    def take(self) -> tuple[int, memoryview]:
        """A free slot and its memory, of CHUNK_BYTES."""
        ...

    def give(self, slot: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Hand verified chunks in a slot to the others: (number, place in the slot, bytes).

        The slot is free again once all have copied their elements; at once without chunks.
        """
        ...

    def finish(self) -> set[int]:
        """Wait until all have what they share; returns the numbers of the chunks that came."""
        ...

    def close(self) -> None:
        """End all sharing. Nothing calls `place` afterwards. May be called twice."""
        ...


def load_shards(
    storage: Storage,
    manifest: Manifest,
    entries: Sequence[LeafEntry],
    regions: Regions,
    sharing: SharedReads | None = None,
) -> dict[str, Leaf]:
    """Read and verify parts of some arrays of `manifest`; raises as `load_leaves` does."""
    firsts: dict[str, int] = {}
    count = 0
    for leaf in manifest.leaves:
        firsts[leaf.path] = count
        count += len(leaf.chunks)
    leaves: dict[str, Leaf] = {}
    in_place: list[tuple[LeafEntry, Chunk, memoryview]] = []
    passing: list[_Passing] = []
    require_packs(storage, manifest, entries)
    sizes = {entry.path: _sizes(entry, regions[entry.path]) for entry in entries}
    for entry in entries:
        wanted = tuple(sizes[entry.path])
        itemsize = _itemsize(entry)
        try:
            parts = tuple(map(leaf_memory, sizes[entry.path].values()))
        except (MemoryError, OSError) as error:
            what = f"{storage.where}: step {manifest.step}, leaf {entry.path!r}"
            raise read_error(error, f"a part of {what} of {entry.nbytes} bytes") from error
        shards = Shards(entry.shape, itemsize, wanted, parts)
        leaves[entry.path] = Leaf(
            entry.dtype, entry.shape, memoryview(b""), frozen=True, shards=shards
        )
        index = RegionIndex(shards.shape, itemsize, wanted)
        for number, (start, stop) in enumerate(chunk_spans(entry.nbytes)):
            if not (slices := index.slices(start, stop)):
                continue
            if (target := _memory_inside(shards, slices, start, stop)) is not None:
                in_place.append((entry, entry.chunks[number], target))
            else:
                chunk = entry.chunks[number]
                place = firsts[entry.path] + number
                passing.append(_Passing(place, entry, chunk, stop - start, shards, slices))
    if sharing is None:
        read_parts(storage, manifest, in_place)
        _pass_through(storage, manifest, passing)
    else:
        with closing(sharing):
            _read_shared(storage, manifest, in_place, passing, sharing)
    return leaves


def _read_shared(
    storage: Storage,
    manifest: Manifest,
    in_place: list[tuple[LeafEntry, Chunk, memoryview]],
    passing: Sequence[_Passing],
    sharing: SharedReads,
) -> None:
    """Read and verify what this process needs, a part of it in other processes of this machine."""
    shared = {item.number: item for item in passing if item.is_shared()}
    alone = sum(len(data) for _, _, data in in_place)
    alone += sum(item.nbytes for item in passing if item.number not in shared)

    def place(number: int, data: memoryview) -> None:
        place_elements(data, shared[number].shards, shared[number].slices)

    wanted = {number: item.nbytes for number, item in shared.items()}
    if not sharing.announce(manifest.fingerprint, wanted, alone, place):
        sharing.close()  # at once: the others wait for what this process announces
        read_parts(storage, manifest, in_place)
        _pass_through(storage, manifest, passing)
        return
    read_parts(storage, manifest, in_place)
    theirs = sharing.divide()
    mine = [item for item in passing if item.number not in theirs]
    _pass_through(storage, manifest, mine, sharing)
    missing = theirs - sharing.finish()
    _pass_through(storage, manifest, [shared[number] for number in missing])


def _sizes(entry: LeafEntry, regions: Sequence[Region]) -> dict[Region, int]:
    """The bytes of each different region."""
    return {region: volume(region) * _itemsize(entry) for region in regions}


def _itemsize(entry: LeafEntry) -> int:
    return entry.nbytes // max(1, math.prod(entry.shape))


class _Passing(NamedTuple):
    """A chunk of `nbytes` bytes, of which some elements belong into shards.

    `number` is that of the chunk in the manifest.
    """

    number: int
    entry: LeafEntry
    chunk: Chunk
    nbytes: int
    shards: Shards
    slices: Sequence[Slice]

    def is_shared(self) -> bool:
        """Whether other processes need elements of it, too, and it is large."""
        own = sum(volume(found.part) for found in self.slices) * self.shards.itemsize
        return own < self.nbytes and self.nbytes >= SMALL_BYTES


class _OwnBuffers:
    """Memory for chunks of which no other process gets anything; see `SharedReads`."""

    def __init__(self, count: int) -> None:
        self._buffers = [take_buffer() for _ in range(count)]
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(count):
            self._free.put(slot)

    def take(self) -> tuple[int, memoryview]:
        slot = self._free.get()
        return slot, memoryview(self._buffers[slot])[:CHUNK_BYTES]

    def give(self, slot: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        self._free.put(slot)

    def close(self) -> None:
        for buffer in self._buffers:
            give_buffer(buffer)


def _pass_through(
    storage: Storage,
    manifest: Manifest,
    passing: Sequence[_Passing],
    sharing: SharedReads | None = None,
) -> None:
    """Read and verify chunks in the memory of a few, and copy their elements into the shards."""
    if not passing:
        return
    threads = READ_THREADS
    if isinstance(storage, StreamingStorage):
        threads = min(storage.streams, MOST_STREAMS)
    own = _OwnBuffers(threads) if sharing is None else None
    buffers = sharing or own
    assert buffers is not None

    def work(batch: Sequence[_Passing]) -> None:
        slot, memory = buffers.take()
        starts = list(accumulate([item.nbytes for item in batch], initial=0))
        verified: list[tuple[int, int, int]] = []
        try:
            places = [memory[start:stop] for start, stop in pairwise(starts)]
            pairs = list(zip(batch, places, strict=True))
            for item in batch if sharing is None else ():
                if isinstance(storage, PageCachedStorage) and item.is_shared():
                    storage.keep_cached(
                        PACKS + manifest.packs[item.chunk.pack].name, item.chunk.offset
                    )
            for read in grouped_reads([(item.entry, item.chunk, data) for item, data in pairs]):
                for check in fetch_reads(storage, manifest, [read]):
                    check()
            for item, data in pairs:
                place_elements(data, item.shards, item.slices)
            verified = [
                (item.number, start, item.nbytes)
                for item, start in zip(batch, starts, strict=False)
            ]
        finally:
            buffers.give(slot, verified)

    # In the order of the packs, small ones together.
    in_order = sorted(passing, key=lambda item: (item.chunk.pack, item.chunk.offset))
    together = batches(in_order, lambda item: item.nbytes, CHUNK_BYTES)
    try:
        # Threads of its own: they wait for other processes, and no other restore may wait for them.
        with ThreadPoolExecutor(threads, thread_name_prefix="perdure-read") as readers:
            for _ in map_ahead(readers, work, together, 2 * threads):
                pass
    finally:
        if own is not None:
            own.close()


def _memory_inside(
    shards: Shards, slices: Sequence[Slice], start: int, stop: int
) -> memoryview | None:
    """The memory of the chunk from `start` to `stop` if all of it lies in one shard."""
    region = slices[0].region
    count = sum(volume(found.part) for found in slices if found.region == region)
    first = first_element(shards.shape, region)
    if first is None or count * shards.itemsize != stop - start:
        return None
    offset = start - first * shards.itemsize
    return shards.parts[shards.regions.index(region)][offset : offset + stop - start]
