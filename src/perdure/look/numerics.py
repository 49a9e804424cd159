"""Elements of leaves as real numbers: their sums in a fixed order, and distances in ULP.

`numpy.sum` and BLAS choose their order by release and processor. Here a block is halved again and
again, and its halves are added, so that a sum of float64 has the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BLOCK = 1 << 15
"""Elements of a block. It decides the order of additions, and so the last bits of every figure."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def blocks(*values: Array) -> Iterator[tuple[Array, ...]]:
    for start in range(0, values[0].size, BLOCK):
        yield tuple(array[start : start + BLOCK] for array in values)


def block_sum(values: Array) -> float:
    while values.size > 1:
        half = (values.size + 1) // 2
        added = values[:half].copy()
        added[: values.size - half] += values[half:]
        values = added
    return float(values[0]) if values.size else 0.0


def product_sum(left: Array, right: Array, total: float = 0.0) -> float:
    """`total` and the products of two float64 arrays of one length, added block by block."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for a, b in blocks(left, right):
            total += block_sum(a * b)
    return total


def root_ratio(part: float, whole: float) -> float | None:
    if not whole:
        return math.inf if part else None
    return math.sqrt(part / whole)


def cosine(both: float, first: float, second: float) -> float | None:
    """The cosine of two vectors, by the sums of their products and of their squares."""
    scale = math.sqrt(first) * math.sqrt(second)
    return both / scale if scale else None


def is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))


def is_inexact(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or dtype.name.startswith(("float", "bfloat"))


def parts_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def bits(values: Array) -> Array:
    return values.view(_WORDS[values.dtype.itemsize])


def as_float64(values: Array) -> Array:
    """Real numbers as float64: exact for floats, rounded to nearest for integers above 2**53."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is one, and no reason for a warning
        return values.astype(np.float64)


def ulp_distance(first: Array, second: Array) -> int:
    """The largest number of steps between two floats of one dtype, of which none is NaN.

    -0.0 and 0.0 are 0 apart; infinity is one step beyond the largest finite value.
    """
    if not first.size:
        return 0
    a, b = _places(first), _places(second)
    # Two float64 may be further apart than the largest int64.
    return int((np.maximum(a, b) - np.minimum(a, b)).view(np.uint64).max())


def integer_distance(first: Array, second: Array) -> int:
    """The largest difference of two integers, exact."""
    if not first.size:
        return 0
    if first.dtype.kind not in "iu":  # booleans, and sub-byte types of ml_dtypes
        first, second = first.astype(np.int64), second.astype(np.int64)
    words = bits(np.ascontiguousarray(first)), bits(np.ascontiguousarray(second))
    return int(np.where(first > second, words[0] - words[1], words[1] - words[0]).max())


def _places(values: Array) -> Array:
    """The number of steps from zero to each float, below 0 for those below."""
    if values.dtype.itemsize == 1:
        return _ranks(values.dtype)[values.view(np.uint8)]
    bits_above = 64 - 8 * values.dtype.itemsize
    words = bits(values).astype(np.int64)
    down = -(words & ((1 << (63 - bits_above)) - 1))
    return np.where(words >> (63 - bits_above), down, words)


@cache
def _ranks(dtype: np.dtype[Any]) -> Array:
    """For each code of a float of one byte, its place among the values: 0 for zero, < 0 below it."""
    values = as_float64(np.arange(256, dtype=np.uint8).view(dtype))
    known = np.unique(values[~np.isnan(values)])  # -0.0 and 0.0 are one value
    zero = int(np.searchsorted(known, 0.0))
    return np.searchsorted(known, values).astype(np.int64) - zero
