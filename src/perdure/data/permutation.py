"""A keyed pseudo-random permutation that is computed by index, without a table.

Owns the shuffle of the examples. Invariant: for one key and one length, `permute` is a bijection of
`range(length)` whose values depend on nothing else. It uses integer operations modulo 2**64 only, so
that no release of numpy and no processor can change them: they are part of every recipe.

The algorithm is a balanced Feistel network (M. Luby and C. Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", SIAM J. Comput. 17, 1988), brought down to an arbitrary
length by cycle walking (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002). The round function is the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; constants of S. Vigna's splitmix64.c).
It mixes well and is no cipher: nothing here is secret.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from perdure.errors import DataError

ROUNDS = 8
MAX_LENGTH = 2**40

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def permute(index: npt.ArrayLike, length: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Where the permutation of `range(length)` under `key` sends each of `index`.

    Time and memory grow with the number of indices and not with `length` (1 to 2**40). Raises
    DataError for a length or an index out of range.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise DataError(f"a permutation needs a length from 1 to 2**40, got {length}")
    wanted = np.asarray(index, dtype=np.int64)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < length):
        raise DataError(
            f"index out of range: expected 0 to {length - 1}, "
            f"found {wanted.min()} to {wanted.max()}"
        )
    # Two halves of the same size; the domain is less than four times as large as the length.
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    flat = _feistel(wanted.reshape(-1).astype(np.uint64), half, keys)
    # A value outside is sent on until it falls inside. Each walk ends, because the network is a
    # bijection whose cycles all that start inside must come back inside.
    outside = np.flatnonzero(flat >= np.uint64(length))
    while outside.size:
        flat[outside] = _feistel(flat[outside], half, keys)
        outside = outside[flat[outside] >= np.uint64(length)]
    return flat.astype(np.int64).reshape(wanted.shape)


def _feistel(
    value: npt.NDArray[np.uint64], half: int, keys: tuple[np.uint64, ...]
) -> npt.NDArray[np.uint64]:
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    # The finaliser's high bits are its best mixed ones.
    take = np.uint64(64 - half)
    left, right = value >> shift, value & low
    for key in keys:
        mixed = finalise(right ^ key)
        left, right = right, left ^ (mixed >> take)
    return (left << shift) | right


@functools.lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> tuple[np.uint64, ...]:
    state = fold(key)
    return tuple(np.uint64(_finalise(state + (i + 1) * _GOLDEN)) for i in range(ROUNDS))


def fold(key: tuple[int, ...]) -> int:
    """64 bits of a tuple of integers; (1, 0), (0, 1) and (1,) give different ones."""
    state = len(key)
    for part in key:
        state = _finalise((state + _GOLDEN) ^ (part & _MASK))
    return state


def finalise(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser of every element: a bijection of 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
    return value ^ (value >> np.uint64(31))


def _finalise(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
