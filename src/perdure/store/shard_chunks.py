"""The bytes of chunks of sharded arrays: in place where they lie in one shard, else put together.

Invariant: no more than a few chunks of a process are in memory beside its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from perdure.store.format import hash_bytes
from perdure.store.shard_plan import (
    Region,
    ShardLayout,
    ShardPlan,
    Slice,
    first_element,
    volume,
)

if TYPE_CHECKING:
    import numpy as np

_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
"""Elements are copied as unsigned integers, or as opaque bytes."""

Fetch = Callable[[int, int, int, Callable[[memoryview], None]], None]
"""Gets the slices of a chunk that another process has: (process, chunk, bytes, what takes them)."""


class Shards(Struct, frozen=True, gc=False):
    """The shards of an array that this process has. Other processes have the rest of the array.

    Attributes:
        shape: The shape of the array. Of PRNG keys it ends with the number of words of a key.
        itemsize: Bytes of one element.
        regions: Which elements each shard has. No region occurs twice.
        parts: The bytes of each shard, row-major and little-endian.
    """

    shape: tuple[int, ...]
    itemsize: int
    regions: tuple[Region, ...]
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class AssembledChunk:
    """A chunk that is put together, from shards of this process and of others, when it is needed.

    Attributes:
        number: The number of the chunk in its leaf.
        nbytes: Its bytes.
        slices: Where they come from.
        shards: The shards of this process.
        process: The number of this process.
        fetch: Gets the slices of another process.
    """

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
                    _place(target, found, itemsize, _elements(self.shards, found))
                continue

            def place(received: memoryview, slices: Sequence[Slice] = slices) -> None:
                for found, data in _cut(received, slices, itemsize):
                    _place(target, found, itemsize, data)

            self.fetch(process, self.number, slices_size(slices, itemsize), place)

    def copy(self) -> memoryview:
        """The bytes of the chunk in new memory."""
        memory = memoryview(bytearray(self.nbytes))
        self.fill(memory)
        return memory


ChunkBytes = memoryview | bytes | AssembledChunk


def whole(chunk: ChunkBytes) -> memoryview | bytes:
    """The bytes of a chunk, in new memory if they are put together."""
    return chunk.copy() if isinstance(chunk, AssembledChunk) else chunk


def assembled_chunks(shards: Shards) -> list[ChunkBytes]:
    """The chunks of an array of which this process has all shards."""

    def fetch(*_: object) -> NoReturn:
        raise AssertionError("this process has all shards")

    layout = ShardLayout(shards.shape, shards.itemsize, (shards.regions,))
    plan = ShardPlan("an array", layout, [0])
    return [chunk for _, chunk in own_chunks(plan, shards, 0, fetch)]


def own_chunks(
    plan: ShardPlan, shards: Shards, process: int, fetch: Fetch
) -> Iterator[tuple[int, ChunkBytes]]:
    """Number and bytes of each chunk of an array that `process`, this one, writes."""
    parts = dict(zip(shards.regions, shards.parts, strict=True))
    for number, writer in enumerate(plan.writers):
        if writer != process:
            continue
        start, stop = plan.spans[number]
        slices = plan.slices(number, process)
        first = None
        holder, (_, region, _, _) = slices[0]
        if holder == process and all(found.region == region for _, found in slices):
            first = first_element(shards.shape, region)
        if first is None:
            chunk = AssembledChunk(number, stop - start, slices, shards, process, fetch)
            yield number, chunk
        else:
            offset = start - first * shards.itemsize
            yield number, parts[region][offset : offset + stop - start]


def slices_of(plan: ShardPlan, number: int, writer: int, process: int) -> list[Slice]:
    """The slices of a chunk that `process` sends to `writer`, in the order in which they travel."""
    return [found for holder, found in plan.slices(number, writer) if holder == process]


def slices_size(slices: Iterable[Slice], itemsize: int) -> int:
    """Bytes of slices."""
    return sum(volume(found.part) for found in slices) * itemsize


def copy_hashes(plan: ShardPlan, shards: Shards) -> Iterator[tuple[Region, list[int], str]]:
    """Each shard of this process of which others have copies: its region, all who have it, its hash."""
    for region, data in zip(shards.regions, shards.parts, strict=True):
        holders = plan.holders.get(region, ())
        if len(holders) > 1:
            yield region, [*holders], hash_bytes(data)


def read_slices(slices: Sequence[Slice], shards: Shards, memory: memoryview) -> int:
    """Put the bytes of slices that the shards of this process have into `memory`, one after the other.

    Returns how many bytes they have.
    """
    for found, data in _cut(memory, slices, shards.itemsize):
        data[...] = _elements(shards, found)
    return slices_size(slices, shards.itemsize)


def place_elements(data: memoryview, shards: Shards, slices: Iterable[Slice]) -> None:
    """Copy elements of a chunk, whose bytes are `data`, into the shards that have them."""
    for part, region, block, start in slices:
        stop = start + volume(block) * shards.itemsize
        shard = _array(shards.parts[shards.regions.index(region)], region, shards.itemsize)
        source = _array(data[start:stop], block, shards.itemsize)
        shard[_inside(part, region)] = source[_inside(part, block)]


def copy_chunk(target: memoryview, chunk: ChunkBytes, copy: Callable[..., None]) -> None:
    """Copy a chunk into memory of its size; `copy` copies memory."""
    if isinstance(chunk, AssembledChunk):
        chunk.fill(target)
    else:
        copy(target, chunk)


def _cut(
    memory: memoryview, slices: Sequence[Slice], itemsize: int
) -> Iterator[tuple[Slice, np.ndarray[Any, Any]]]:
    """Each slice, and an array over its bytes."""
    start = 0
    for found in slices:
        size = volume(found.part) * itemsize
        yield found, _array(memory[start : start + size], found.part, itemsize)
        start += size


def _elements(shards: Shards, found: Slice) -> np.ndarray[Any, Any]:
    """The elements of a slice, in the memory of the shard of this process."""
    data = shards.parts[shards.regions.index(found.region)]
    shard = _array(data, found.region, shards.itemsize)
    return shard[_inside(found.part, found.region)]


def _place(target: memoryview, found: Slice, itemsize: int, elements: np.ndarray[Any, Any]) -> None:
    """Copy the elements of a slice to their places in a chunk."""
    stop = found.start + volume(found.block) * itemsize
    block = _array(target[found.start : stop], found.block, itemsize)
    block[_inside(found.part, found.block)] = elements


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
