"""Counters and sums that grow over a whole run without losing the contribution of a single step.

An accumulator is an array of shape [2, ...], the high and the low part, with the same dtypes on every
engine, so that a checkpoint of one restores on another. A counter (int32) is exact up to 2**61,
without 64-bit integers, which JAX lacks by default. A sum (float32) keeps the rounding error of each
addition in its low part (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B: TwoSum).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.distribute.arrays import is_traced, namespace, on_host

COUNTER, SUM = "int32", "float32"

_BITS = 30


def zeros(shape: tuple[int, ...], dtype: str) -> Any:
    """An empty counter or sum for values of `shape`. NumPy, which every engine takes."""
    return np.zeros((2, *shape), dtype)


def add(accumulator: Any, value: Any) -> Any:
    """The accumulator with `value` added: integers (below 2**30 in size) or float32."""
    xp = namespace(accumulator, value)
    high, low = xp.array(accumulator)
    if _is_counter(accumulator):
        low = low + xp.constant(value, COUNTER)
        # A shift rounds down, so that the low part is never negative.
        return xp.array(xp.stack([high + (low >> _BITS), low & ((1 << _BITS) - 1)]), COUNTER)
    value = xp.constant(value, SUM)
    total = high + value
    part = total - high
    error = (high - (total - part)) + (value - part)
    return xp.stack([total, low + error])


def read(accumulator: Any) -> Any:
    """The value: NumPy's int64 or float64; inside of jit, a float, which may be rounded."""
    high, low = on_host(accumulator)
    if is_traced(accumulator):
        return high * float(1 << _BITS) + low if _is_counter(accumulator) else high + low
    if _is_counter(accumulator):
        return (np.int64(high) << _BITS) + np.int64(low)
    return np.float64(high) + np.float64(low)


def _is_counter(accumulator: Any) -> bool:
    return "int" in str(accumulator.dtype)
