"""Which process writes each chunk of a sharded array, and where the bytes of the chunk come from.

Pure functions of the layouts, so that every process finds the same plan. Invariants: each chunk has one
writer, a process that has as many bytes of it as any other, so that as few bytes as possible move; and
each byte of a chunk comes from one process.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.store.format import CHUNK_BYTES, chunk_spans

Region = tuple[tuple[int, int], ...]
"""A part of an array: (start, stop) along each axis."""


class ShardLayout(Struct, frozen=True):
    """Which elements of an array each process has.

    Attributes:
        shape: The shape of the array.
        itemsize: Bytes of one element.
        regions: The regions of each process. Two regions are equal (copies) or have no common element.
    """

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
    """Elements of a chunk that lie in one region.

    Attributes:
        part: These elements.
        region: The region, which is that of a shard.
        block: A block of elements that follow each other in the chunk, with these among them.
        start: Where the block begins in the chunk, in bytes.
    """

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
    """The plan for one array.

    Args:
        name: What errors call the array.
        layout: Where its elements are.
        load: The bytes that each process has been given so far, which this increases. Of several
            processes that have equally much of a chunk, the one with the least load writes it.

    Attributes:
        writers: The process that writes each chunk.
        holders: The processes that have each region.

    Raises:
        CorruptionError: No process has some elements, or two regions overlap.
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


def blocks(shape: tuple[int, ...], start: int, stop: int) -> list[Region]:
    """The elements from `start` to `stop`, in row-major order, as blocks in that order.

    The elements of a block follow each other in that order. There are less than twice as many blocks
    as axes.
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
