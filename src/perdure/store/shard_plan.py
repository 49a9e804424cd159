"""Arrays whose elements lie in several processes or on several devices: who has, writes and sends what.

Regions, layouts and plans are pure, so that every process finds the same plan. Invariants: each chunk
has one writer, a process that has as many bytes of it as any other, so that as few bytes as possible
move; each byte of a chunk comes from one process; and no more than a few chunks of a process are in
memory beside its shards.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.store.format import CHUNK_BYTES, chunk_spans

if TYPE_CHECKING:
    import numpy as np

Region = tuple[tuple[int, int], ...]
"""A part of an array: (start, stop) along each axis."""


class ShardLayout(Struct, frozen=True):
    """Which elements of an array each process has; two regions are equal (copies) or disjoint."""

    shape: tuple[int, ...]
    itemsize: int
    regions: tuple[tuple[Region, ...], ...]

    def holders(self) -> dict[Region, list[int]]:
        """The processes that have each region, without empty regions."""
        holders: dict[Region, list[int]] = {}
        for process, regions in enumerate(self.regions):
            for region in regions:
                if volume(region):
                    holders.setdefault(region, []).append(process)
        return holders


class Slice(NamedTuple):
    """The elements `part` of a chunk in a `region`, and the contiguous `block` around them."""

    part: Region
    region: Region
    block: Region
    start: int


class RegionIndex:
    """Finds which of many regions of an array have elements in a chunk."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, regions: Iterable[Region]) -> None:
        self._shape, self._itemsize = shape, itemsize
        self._regions = sorted(region for region in regions if volume(region))
        self._starts = [region[0][0] if region else 0 for region in self._regions]
        stops = [region[0][1] if region else 1 for region in self._regions]
        self._reach = list(accumulate(stops, max))

    def slices(self, start: int, stop: int) -> list[Slice]:
        """What the regions have of the bytes from `start` to `stop`, which are whole elements."""
        size = self._itemsize
        found = []
        offset = 0
        for block in blocks(self._shape, start // size, stop // size):
            first, last = block[0] if block else (0, 1)
            index = bisect_left(self._starts, last) - 1
            while index >= 0 and self._reach[index] > first:
                region = self._regions[index]
                if (part := intersection(block, region)) is not None:
                    found.append(Slice(part, region, block, offset))
                index -= 1
            offset += volume(block) * size
        return found


class ShardPlan:
    """The plan for one array: `writers` of each chunk, `holders` of each region.

    Of several processes with equally much of a chunk, the one with the least `load` (bytes given to
    it, which this increases) writes it. Raises CorruptionError if elements are missing or regions
    overlap.
    """

    def __init__(self, name: str, layout: ShardLayout, load: list[int]) -> None:
        self.holders = layout.holders()
        self._index = RegionIndex(layout.shape, layout.itemsize, self.holders)
        nbytes = math.prod(layout.shape) * layout.itemsize
        if nbytes and CHUNK_BYTES % layout.itemsize:
            raise CorruptionError(f"{name}: elements of {layout.itemsize} bytes cross chunks.")
        self.spans = chunk_spans(nbytes)
        self.writers: list[int] = []
        for number, (start, stop) in enumerate(self.spans):
            held: dict[int, int] = {}
            total = 0
            for part, region, _, _ in self._index.slices(start, stop):
                size = volume(part) * layout.itemsize
                total += size
                for process in self.holders[region]:
                    held[process] = held.get(process, 0) + size
            if total != stop - start:
                raise CorruptionError(
                    f"{name}: expected {stop - start} bytes of chunk {number} in the shards of the "
                    f"{len(layout.regions)} processes, found {total}."
                )
            writer = min(held, key=lambda process: (-held[process], load[process], process))
            load[writer] += total
            self.writers.append(writer)

    def slices(self, number: int, writer: int) -> list[tuple[int, Slice]]:
        """The slices of a chunk, each with the process that `writer` takes it from: itself, or else the
        first one that has it."""
        return [
            (writer if writer in (holders := self.holders[found.region]) else holders[0], found)
            for found in self._index.slices(*self.spans[number])
        ]


def plan_shards(layouts: Mapping[str, ShardLayout], count: int) -> dict[str, ShardPlan]:
    """The plans of all sharded arrays of a state by path, the same in each of `count` processes."""
    load = [0] * count
    return {
        path: ShardPlan(f"leaf {path!r}", layout, load) for path, layout in sorted(layouts.items())
    }


_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
"""Elements are copied as unsigned integers, or as opaque bytes."""

Fetch = Callable[[int, int, int, Callable[[memoryview], None]], None]
"""Gets the slices of a chunk that another process has: (process, chunk, bytes, what takes them)."""


class Shards(Struct, frozen=True, gc=False):
    """The shards of an array that this process has, as row-major little-endian bytes by region.

    The shape of PRNG keys ends with the number of words of a key. No region occurs twice.
    """

    shape: tuple[int, ...]
    itemsize: int
    regions: tuple[Region, ...]
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    def elements(self, found: Slice) -> np.ndarray[Any, Any]:
        """The elements of a slice, in the memory of the shard that has them."""
        data = self.parts[self.regions.index(found.region)]
        return _array(data, found.region, self.itemsize)[_inside(found.part, found.region)]

    def inside(self, slices: Sequence[Slice], start: int, stop: int) -> memoryview | None:
        """The memory of the chunk from `start` to `stop`, which has these slices, if it lies in one
        shard without a gap."""
        region = slices[0].region
        first = first_element(self.shape, region)
        if first is None or any(found.region != region for found in slices):
            return None
        if slices_size(slices, self.itemsize) != stop - start:
            return None
        offset = start - first * self.itemsize
        return self.parts[self.regions.index(region)][offset : offset + stop - start]


@dataclass(frozen=True, slots=True, eq=False)
class AssembledChunk:
    """A chunk that is put together, from shards of this process and of others, when it is needed."""

    number: int
    nbytes: int
    slices: Sequence[tuple[int, Slice]]
    shards: Shards
    process: int
    fetch: Fetch

    def __len__(self) -> int:
        return self.nbytes

    def fill(self, target: memoryview) -> None:
        """Put the bytes of the chunk into `target`. Raises `OSError` if another process is gone."""
        by_process: dict[int, list[Slice]] = {}
        for process, found in self.slices:
            by_process.setdefault(process, []).append(found)
        itemsize = self.shards.itemsize
        for process, slices in by_process.items():
            if process == self.process:
                for found in slices:
                    _in_chunk(target, found, itemsize)[...] = self.shards.elements(found)
                continue

            def place(received: memoryview, slices: Sequence[Slice] = slices) -> None:
                for found, data in _in_turn(received, slices, itemsize):
                    _in_chunk(target, found, itemsize)[...] = data

            self.fetch(process, self.number, slices_size(slices, itemsize), place)


ChunkBytes = memoryview | bytes | AssembledChunk


def whole(chunk: ChunkBytes) -> memoryview | bytes:
    """The bytes of a chunk, in new memory if they are put together."""
    if not isinstance(chunk, AssembledChunk):
        return chunk
    memory = memoryview(bytearray(chunk.nbytes))
    chunk.fill(memory)
    return memory


def assembled_chunks(shards: Shards) -> list[ChunkBytes]:
    """The chunks of an array whose shards are all in this process."""

    def fetch(*_: object) -> NoReturn:
        raise AssertionError("this process has all shards")

    layout = ShardLayout(shards.shape, shards.itemsize, (shards.regions,))
    plan = ShardPlan("an array", layout, [0])
    return [chunk for _, chunk in own_chunks(plan, shards, 0, fetch)]


def own_chunks(
    plan: ShardPlan, shards: Shards, process: int, fetch: Fetch
) -> Iterator[tuple[int, ChunkBytes]]:
    """Number and bytes of each chunk of an array that `process`, this one, writes."""
    for number, writer in enumerate(plan.writers):
        if writer != process:
            continue
        start, stop = plan.spans[number]
        slices = plan.slices(number, process)
        is_here = all(holder == process for holder, _ in slices)
        inside = shards.inside([found for _, found in slices], start, stop) if is_here else None
        if inside is None:
            inside = AssembledChunk(number, stop - start, slices, shards, process, fetch)
        yield number, inside


def slices_of(plan: ShardPlan, number: int, writer: int, process: int) -> list[Slice]:
    """The slices of a chunk that `process` sends to `writer`, in the order in which they travel."""
    return [found for holder, found in plan.slices(number, writer) if holder == process]


def slices_size(slices: Iterable[Slice], itemsize: int) -> int:
    """Bytes of slices."""
    return sum(volume(found.part) for found in slices) * itemsize


def read_slices(slices: Sequence[Slice], shards: Shards, memory: memoryview) -> int:
    """Put the slices that the shards of this process have into `memory`; returns how many bytes."""
    for found, data in _in_turn(memory, slices, shards.itemsize):
        data[...] = shards.elements(found)
    return slices_size(slices, shards.itemsize)


def place_elements(data: memoryview, shards: Shards, slices: Iterable[Slice]) -> None:
    """Copy elements of a chunk, whose bytes are `data`, into the shards that have them."""
    for found in slices:
        shards.elements(found)[...] = _in_chunk(data, found, shards.itemsize)


def _in_turn(
    memory: memoryview, slices: Sequence[Slice], itemsize: int
) -> Iterator[tuple[Slice, np.ndarray[Any, Any]]]:
    """Each slice, and an array over its bytes, which follow each other in `memory`."""
    start = 0
    for found in slices:
        size = volume(found.part) * itemsize
        yield found, _array(memory[start : start + size], found.part, itemsize)
        start += size


def _in_chunk(data: memoryview, found: Slice, itemsize: int) -> np.ndarray[Any, Any]:
    """The elements of a slice, in the bytes of its chunk."""
    stop = found.start + volume(found.block) * itemsize
    block = _array(data[found.start : stop], found.block, itemsize)
    return block[_inside(found.part, found.block)]


def blocks(shape: tuple[int, ...], start: int, stop: int) -> list[Region]:
    """The elements from `start` to `stop`, row-major, as blocks that are contiguous in that order.

    There are less than twice as many blocks as axes.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    first, last = start // inner, stop // inner
    found: list[Region] = []
    if first == last:
        return _below(first, blocks(inner_shape, start % inner, stop % inner))
    if start % inner:
        found += _below(first, blocks(inner_shape, start % inner, inner))
        first += 1
    if first < last:
        found.append(((first, last), *((0, size) for size in inner_shape)))
    return found + _below(last, blocks(inner_shape, 0, stop % inner))


def intersection(one: Region, other: Region) -> Region | None:
    """The elements that are in both regions; None if there are none."""
    common = []
    for (start, stop), (first, last) in zip(one, other, strict=True):
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def volume(region: Region) -> int:
    """How many elements a region has."""
    return math.prod([stop - start for start, stop in region])


def first_element(shape: tuple[int, ...], region: Region) -> int | None:
    """The number of the first element of a region, in row-major order, if all others follow it
    without a gap; else None."""
    number, is_whole = 0, True
    for (start, stop), size in zip(reversed(region), reversed(shape), strict=True):
        if not is_whole and stop - start > 1:
            return None
        is_whole = is_whole and (start, stop) == (0, size)
    for (start, _), size in zip(region, shape, strict=True):
        number = number * size + start
    return number


def _below(index: int, regions: list[Region]) -> list[Region]:
    return [((index, index + 1), *region) for region in regions]


def _array(data: memoryview, region: Region, itemsize: int) -> np.ndarray[Any, Any]:
    import numpy as np  # not needed to list a run

    shape = [stop - start for start, stop in region]
    return np.frombuffer(data, _WORDS.get(itemsize, f"V{itemsize}")).reshape(shape)


def _inside(part: Region, region: Region) -> tuple[slice, ...]:
    """A part of a region as slices of an array that has the elements of the region."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(part, region, strict=True)
    )
