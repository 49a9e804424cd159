"""The bytes of chunks of sharded arrays: in place where they lie in one shard, else put together.

Invariant: no more than a few chunks of a process are in memory beside its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from perdure.store.format import hash_bytes
from perdure.store.shard_plan import (
    Overlap,
    Piece,
    Region,
    ShardLayout,
    ShardPlan,
    first_element,
    volume,
)

if TYPE_CHECKING:
    import numpy as np

_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
"""Elements are copied as unsigned integers, or as opaque bytes."""

Fetch = Callable[[int, int, int, Callable[[memoryview], None]], None]
"""Gets the pieces of a chunk that another process has: (process, chunk, bytes, what takes them)."""


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


class AssembledChunk:
    """A chunk that is put together, from shards of this process and of others, when it is needed.

    Args:
        number: The number of the chunk in its leaf.
        nbytes: Its bytes.
        pieces: Where they come from.
        shards: The shards of this process.
        process: The number of this process.
        fetch: Gets the pieces of another process.
    """

    def __init__(
        self,
        number: int,
        nbytes: int,
        pieces: Sequence[Piece],
        shards: Shards,
        process: int,
        fetch: Fetch,
    ) -> None:
        self._number = number
        self._nbytes = nbytes
        self._pieces = pieces
        self._shards = shards
        self._process = process
        self._fetch = fetch

    def __len__(self) -> int:
        return self._nbytes

    def fill(self, target: memoryview) -> None:
        """Put the bytes of the chunk into `target`. Raises `OSError` if another process is gone."""
        by_process: dict[int, list[Piece]] = {}
        for piece in self._pieces:
            by_process.setdefault(piece.process, []).append(piece)
        itemsize = self._shards.itemsize
        for process, pieces in by_process.items():
            if process == self._process:
                for piece in pieces:
                    _place(target, piece, itemsize, _elements(self._shards, piece))
                continue

            def place(received: memoryview, pieces: Sequence[Piece] = pieces) -> None:
                for piece, data in _cut(received, pieces, itemsize):
                    _place(target, piece, itemsize, data)

            self._fetch(process, self._number, pieces_size(pieces, itemsize), place)

    def copy(self) -> memoryview:
        """The bytes of the chunk in new memory."""
        memory = memoryview(bytearray(self._nbytes))
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
        pieces = plan.pieces(number, process)
        first = None
        if len({piece.region for piece in pieces}) == 1 and pieces[0].process == process:
            first = first_element(shards.shape, pieces[0].region)
        if first is None:
            yield (
                number,
                AssembledChunk(number, stop - start, pieces, shards, process, fetch),
            )
        else:
            offset = start - first * shards.itemsize
            yield number, parts[pieces[0].region][offset : offset + stop - start]


def pieces_of(plan: ShardPlan, number: int, writer: int, process: int) -> list[Piece]:
    """The pieces of a chunk that `process` sends to `writer`, in the order in which they travel."""
    return [piece for piece in plan.pieces(number, writer) if piece.process == process]


def pieces_size(pieces: Iterable[Piece], itemsize: int) -> int:
    """Bytes of pieces."""
    return sum(volume(piece.part) for piece in pieces) * itemsize


def copy_hashes(plan: ShardPlan, shards: Shards) -> Iterator[tuple[Region, list[int], str]]:
    """Each shard of this process of which others have copies: its region, all who have it, its hash."""
    for region, data in zip(shards.regions, shards.parts, strict=True):
        holders = plan.holders.get(region, ())
        if len(holders) > 1:
            yield region, [*holders], hash_bytes(data)


def read_pieces(pieces: Sequence[Piece], shards: Shards, memory: memoryview) -> int:
    """Put the bytes of pieces that the shards of this process have into `memory`, one after the other.

    Returns how many bytes they have.
    """
    for piece, data in _cut(memory, pieces, shards.itemsize):
        data[...] = _elements(shards, piece)
    return pieces_size(pieces, shards.itemsize)


def place_elements(data: memoryview, shards: Shards, overlaps: Iterable[Overlap]) -> None:
    """Copy elements of a chunk, whose bytes are `data`, into the shards that have them."""
    for part, region, block, start in overlaps:
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
    memory: memoryview, pieces: Sequence[Piece], itemsize: int
) -> Iterator[tuple[Piece, np.ndarray[Any, Any]]]:
    """Each piece, and an array over its bytes."""
    start = 0
    for piece in pieces:
        size = volume(piece.part) * itemsize
        yield piece, _array(memory[start : start + size], piece.part, itemsize)
        start += size


def _elements(shards: Shards, piece: Piece) -> np.ndarray[Any, Any]:
    """The elements of a piece, in the memory of the shard of this process."""
    data = shards.parts[shards.regions.index(piece.region)]
    shard = _array(data, piece.region, shards.itemsize)
    return shard[_inside(piece.part, piece.region)]


def _place(target: memoryview, piece: Piece, itemsize: int, elements: np.ndarray[Any, Any]) -> None:
    """Copy the elements of a piece to their places in a chunk."""
    stop = piece.start + volume(piece.block) * itemsize
    block = _array(target[piece.start : stop], piece.block, itemsize)
    block[_inside(piece.part, piece.block)] = elements


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
