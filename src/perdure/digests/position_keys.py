"""The 64-bit keys by which a digest multiplies the words of an array: functions of the position alone.

The word at `position` has the key `row_key[position // LANES] * lane_key[position % LANES]` in each of
the two sums. All are odd, so that a product with a key is zero only if the word is.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

LANES = 16_384
"""Words of 8 bytes in a row; a row has 128 KiB."""
ROW_BYTES = 8 * LANES

_ROW_STREAM = 2
_STREAM_SHIFT = np.uint64(48)
_ONE = np.uint64(1)


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
