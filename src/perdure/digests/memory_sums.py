"""The two sums of a digest over bytes in the memory of this process, with NumPy.

The sums are linear: those of an array are the sums of its parts, added modulo 2**64, in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from perdure.digests.position_keys import LANES, ROW_BYTES, lane_keys, row_keys
from perdure.store.leaf import Region
from perdure.store.pools import map_ahead, pool

Sums = np.ndarray[Any, np.dtype[np.uint64]]
"""`uint64[2]`."""
Octets = np.ndarray[Any, np.dtype[np.uint8]]
Array = TypeVar("Array")

THREADS = 2
PART_ROWS = 64
"""Rows that a thread takes at a time."""
SLAB_BYTES = 1 << 20

_NATIVE, _REVERSED = np.dtype("<u8"), np.dtype(">u8")
_scratch = threading.local()


def byte_sums(octets: Octets, offset: int = 0) -> Sums:
    """The sums of contiguous bytes that begin at byte `offset` of their array."""
    total = np.zeros(2, np.uint64)
    row, start = divmod(offset, ROW_BYTES)
    if start or octets.size < ROW_BYTES:
        head = octets[: ROW_BYTES - start]
        total += _part_of_row(head, row, start)
        octets, row = octets[head.size :], row + 1
    count = octets.size // ROW_BYTES
    words = octets[: count * ROW_BYTES].view(_NATIVE).reshape(count, LANES)
    parts = [(words[n : n + PART_ROWS], row + n) for n in range(0, count, PART_ROWS)]
    if len(parts) > 1:
        for sums in map_ahead(pool("digest", THREADS), lambda part: _rows(*part), parts, THREADS):
            total += sums
    elif parts:
        total += _rows(*parts[0])
    if (tail := octets[count * ROW_BYTES :]).size:
        total += _part_of_row(tail, row + count, 0)
    return total


def region_sums(part: np.ndarray[Any, Any], region: Region, shape: tuple[int, ...]) -> Sums:
    """The sums of the elements of an array of `shape` that lie in `region`.

    Args:
        part: the elements, as an array of the size of `region`.
        region: their place in the whole array.
        shape: the shape of the whole array.
    """
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
    """The sums of a part of an array, from the sums of contiguous arrays; for NumPy and PyTorch.

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
        place = offset + first * stride
        if stride > SLAB_BYTES:
            total = total + sums_by_slabs(
                rows[0], region[1:], shape[1:], itemsize, contiguous, zeros, place
            )
            continue
        slab = zeros((len(rows), *shape[1:]))
        slab[(slice(None), *(slice(*span) for span in region[1:]))] = rows
        total = total + contiguous(slab, place)
    return total


def _part_of_row(octets: Octets, row: int, start: int) -> Sums:
    """The sums of bytes that begin at byte `start` of a row and do not leave it."""
    first, shift = divmod(start, 8)
    count = -(-(shift + octets.size) // 8)
    padded = np.zeros(8 * count, np.uint8)
    padded[shift : shift + octets.size] = octets
    keys = lane_keys()[:, first : first + count]
    in_order = (padded.view(_NATIVE) * keys[0]).sum(dtype=np.uint64)
    reverse = (padded.view(_REVERSED).astype(np.uint64) * keys[1]).sum(dtype=np.uint64)
    return np.stack([in_order, reverse]) * row_keys(row, 1)[:, 0]


def _rows(words: np.ndarray[Any, Any], first: int) -> Sums:
    """The sums of whole rows, `[rows, LANES]`, from row `first`."""
    lanes, product = _lanes()
    lanes[:] = 0
    keys = row_keys(first, len(words))
    # Each operation goes over one row of 128 KiB, so that all operands stay in the cache.
    for row, in_order_key, reverse_key in zip(words, *keys, strict=True):
        np.multiply(row, in_order_key, out=product)
        np.add(lanes[0], product, out=lanes[0])
        np.copyto(product, row.view(_REVERSED))
        np.multiply(product, reverse_key, out=product)
        np.add(lanes[1], product, out=lanes[1])
    return (lanes * lane_keys()).sum(axis=1, dtype=np.uint64)


def _lanes() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Arrays of this thread that are used again, because touching new memory takes longer."""
    if not hasattr(_scratch, "arrays"):
        _scratch.arrays = np.empty((2, LANES), np.uint64), np.empty(LANES, np.uint64)
    return _scratch.arrays
