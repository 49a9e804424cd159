"""The two sums of a digest over bytes in the memory of this process, with NumPy.

Each word is multiplied by an odd 64-bit key, a function of its position alone: `row_key[position //
LANES] * lane_key[position % LANES]`. The sums are linear: those of an array are the sums of its
parts modulo 2**64, in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from perdure.store.pools import map_ahead, pool
from perdure.store.shard_plan import Region

Sums = np.ndarray[Any, np.dtype[np.uint64]]
"""`uint64[2]`."""
Octets = np.ndarray[Any, np.dtype[np.uint8]]

LANES = 16_384
"""Words of 8 bytes in a row; a row has 128 KiB."""
ROW_BYTES = 8 * LANES

_ROW_STREAM = 2
_STREAM_SHIFT = np.uint64(48)
_ONE = np.uint64(1)

THREADS = 2
PART_ROWS = 64
"""Rows that a thread takes at a time."""
BLOCK_ROWS = 4
"""Rows whose words are reversed at a time: with their copy they fit into the cache of a core."""
SLAB_BYTES = 1 << 20

SMALL_BYTES = 4096
"""So few bytes are summed together with those of other leaves: the calls would take longer."""
_SMALL_WORDS = (64, SMALL_BYTES // 8)
"""Small leaves are padded to the next of these lengths, in words."""
_TOGETHER_BYTES = 1 << 18

_NATIVE, _REVERSED = np.dtype("<u8"), np.dtype(">u8")
_scratch = threading.local()


def byte_sums(octets: Octets, offset: int = 0) -> Sums:
    """The sums of contiguous bytes that begin at byte `offset` of their array."""
    row, start = divmod(offset, ROW_BYTES)
    total = np.zeros(2, np.uint64)
    if start:
        head = octets[: ROW_BYTES - start]
        total += _part_of_row(head, row, start)
        octets, row = octets[head.size :], row + 1
    if count := octets.size // ROW_BYTES:
        words = octets[: count * ROW_BYTES].view(_NATIVE).reshape(count, LANES)
        octets = octets[count * ROW_BYTES :]
        parts = [(words[n : n + PART_ROWS], row + n) for n in range(0, count, PART_ROWS)]
        row += count
        if len(parts) == 1:
            total += _rows(*parts[0])
        else:
            run = pool("digest", THREADS)
            for sums in map_ahead(run, lambda part: _rows(*part), parts, THREADS):
                total += sums
    if octets.size:
        total += _part_of_row(octets, row, 0)
    return total


def small_sums(parts: Sequence[memoryview | bytes]) -> list[tuple[int, int]]:
    """The sums of each of many arrays of at most `SMALL_BYTES`."""
    sums = [(0, 0)] * len(parts)
    shorter = -1
    for count in _SMALL_WORDS:
        width = 8 * count
        members = [n for n, part in enumerate(parts) if shorter < len(part) <= width]
        shorter = width
        step = _TOGETHER_BYTES // width
        for first in range(0, len(members), step):
            together = members[first : first + step]
            lines = bytearray(width * len(together))
            for line, number in enumerate(together):
                part = parts[number]
                lines[line * width : line * width + len(part)] = part
            words = np.frombuffer(lines, _NATIVE).reshape(-1, count)
            both = _dots(words, lane_keys()) * row_keys(0, 1)
            for number, *pair in zip(together, *both.tolist(), strict=True):
                sums[number] = pair[0], pair[1]
    return sums


def region_sums(part: np.ndarray[Any, Any], region: Region, shape: tuple[int, ...]) -> Sums:
    """The sums of `part`, the elements of an array of `shape` at the indices `region`."""
    part = np.ascontiguousarray(part).reshape(part.shape)
    return sums_by_slabs(
        part,
        region,
        shape,
        part.itemsize,
        lambda array, offset: byte_sums(array.reshape(-1).view(np.uint8), offset),
        lambda slab_shape: np.zeros(slab_shape, part.dtype),
    )


def sums_by_slabs(
    part: Any,
    region: Region,
    shape: tuple[int, ...],
    itemsize: int,
    contiguous: Callable[[Any, int], Any],
    zeros: Callable[[tuple[int, ...]], Any],
    offset: int = 0,
) -> Any:
    """The sums of a part of an array, from those of contiguous arrays; for NumPy and PyTorch.

    A part that is not contiguous in its array is copied into slabs of zeros, which add nothing.
    """
    first_whole = len(shape)
    while first_whole and region[first_whole - 1] == (0, shape[first_whole - 1]):
        first_whole -= 1
    stride = itemsize * int(np.prod(shape[1:], dtype=object))
    if first_whole <= 1:
        return contiguous(part, offset + (region[0][0] * stride if shape else 0))
    start, stop = region[0]
    total = contiguous(zeros((0,)), 0)
    step = max(1, SLAB_BYTES // max(1, stride))
    for first in range(start, stop, step):
        rows = part[first - start : min(first + step, stop) - start]
        start_byte = offset + first * stride
        if stride > SLAB_BYTES:
            total = total + sums_by_slabs(
                rows[0], region[1:], shape[1:], itemsize, contiguous, zeros, start_byte
            )
            continue
        slab = zeros((len(rows), *shape[1:]))
        slab[(slice(None), *(slice(*span) for span in region[1:]))] = rows
        total = total + contiguous(slab, start_byte)
    return total


def _part_of_row(octets: Octets, row: int, start: int) -> Sums:
    """The sums of bytes that begin at byte `start` of a row and do not leave it."""
    first, shift = divmod(start, 8)
    if shift or octets.size % 8:
        padded = np.zeros(-(-(shift + octets.size) // 8) * 8, np.uint8)
        padded[shift : shift + octets.size] = octets
        octets = padded
    words = octets.view(_NATIVE).reshape(1, -1)
    both = _dots(words, lane_keys()[:, first:])
    return np.concatenate(both) * row_keys(row, 1)[:, 0]


def _rows(words: np.ndarray[Any, Any], first: int) -> Sums:
    """The sums of whole rows, `[rows, LANES]`, from row `first`."""
    sums = np.empty((2, len(words)), np.uint64)
    for start in range(0, len(words), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        sums[:, block] = _dots(words[block], lane_keys())
    sums *= row_keys(first, len(words))
    return np.add.reduce(sums, 1)


def _dots(words: np.ndarray[Any, Any], keys: np.ndarray[Any, Any]) -> Any:
    """Both sums of each line of words times the first of `keys`, without the row keys."""
    count = words.shape[1]
    if not hasattr(_scratch, "words"):  # touching new memory takes longer
        _scratch.words = np.empty(BLOCK_ROWS * LANES, np.uint64)
    swapped = _scratch.words[: words.size].reshape(words.shape)
    swapped[...] = words.view(_REVERSED)
    # `einsum` multiplies and adds in one pass; the loop of `dot` for integers is slower.
    return (
        np.einsum("ij,j->i", words, keys[0, :count]),
        np.einsum("ij,j->i", swapped, keys[1, :count]),
    )


def mixed(numbers: Any) -> Any:
    """The finalizer of SplitMix64, for `uint64` arrays of NumPy and JAX.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014).
    """
    state = (numbers + _ONE) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def lane_keys_at(lanes: Any, which: int) -> Any:
    """The keys of the `uint64` array `lanes`, in the sum number `which`."""
    return mixed(lanes | (np.uint64(which) << _STREAM_SHIFT)) | _ONE


def row_keys_at(rows: Any, which: int) -> Any:
    """The keys of the `uint64` array `rows`, in the sum number `which`."""
    return mixed(rows | (np.uint64(_ROW_STREAM + which) << _STREAM_SHIFT)) | _ONE


@cache
def lane_keys() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """All lane keys of both sums, `[2, LANES]`."""
    lanes = np.arange(LANES, dtype=np.uint64)
    return np.stack([lane_keys_at(lanes, which) for which in range(2)])


@lru_cache(256)
def row_keys(first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The keys of `count` rows from row `first`, `[2, count]`."""
    rows = np.arange(first, first + count, dtype=np.uint64)
    return np.stack([row_keys_at(rows, which) for which in range(2)])
