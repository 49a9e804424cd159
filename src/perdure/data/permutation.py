"""A keyed pseudo-random permutation that is computed by index, without a table.

Invariant: for a given key and length, `permute` is a bijection of `range(length)` that depends on
nothing else. It uses only integer operations modulo 2**64, so that no release of NumPy and no processor
changes the order of the examples.

The algorithm is a balanced Feistel network (M. Luby and C. Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", SIAM J. Comput. 17, 1988), reduced to an arbitrary length
by cycle walking (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002). The round function is the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; constants of S. Vigna's splitmix64.c).
It mixes well, but is not a cipher.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from perdure.errors import DataError

_ROUNDS = 8

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def permute(index: npt.ArrayLike, length: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The images (int64) of indices below `length`, at most 2**40, under a permutation of `key`."""
    if not 1 <= length <= 2**40:
        raise DataError(f"length of a permutation: expected from 1 to 2**40, found {length}.")
    index = np.asarray(index, dtype=np.int64)
    if index.size and not (index.min() >= 0 and index.max() < length):
        raise DataError(
            f"index out of range: expected 0 to {length - 1}, found {index.min()} to {index.max()}."
        )
    # Two halves of the same size; the domain is less than four times the length.
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    flat = _feistel(index.reshape(-1).astype(np.uint64), half, keys)
    # Cycle walking ends, because the network is a bijection: a cycle with a value inside returns to it.
    outside = np.flatnonzero(flat >= np.uint64(length))
    while outside.size:
        flat[outside] = _feistel(flat[outside], half, keys)
        outside = outside[flat[outside] >= np.uint64(length)]
    return flat.astype(np.int64).reshape(index.shape)


def _feistel(
    value: npt.NDArray[np.uint64], half: int, keys: tuple[np.uint64, ...]
) -> npt.NDArray[np.uint64]:
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    # The high bits of the finaliser are mixed best.
    take = np.uint64(64 - half)
    left, right = value >> shift, value & low
    for key in keys:
        mixed = finalise(right ^ key)
        left, right = right, left ^ (mixed >> take)
    return (left << shift) | right


@functools.lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> tuple[np.uint64, ...]:
    state = fold(key)
    words = [(state + (i + 1) * _GOLDEN) & _MASK for i in range(_ROUNDS)]
    return tuple(finalise(np.array(words, np.uint64)))


def fold(key: tuple[int, ...]) -> int:
    state = len(key)
    for part in key:
        word = ((state + _GOLDEN) ^ part) & _MASK
        state = int(finalise(np.array([word], np.uint64))[0])
    return state


def finalise(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
    return value ^ (value >> np.uint64(31))
