"""Digests of JAX arrays: inside of a compiled step, on an accelerator, and of several shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils

from perdure.digests import leaf_sums
from perdure.digests.jax_sums import words_in_place, words_of_array
from perdure.digests.leaf_sums import LaterSums, LeafSums
from perdure.digests.memory_sums import Sums, region_sums
from perdure.errors import UnsupportedLeafError
from perdure.state.jax_state import leaf_dtype, numbers
from perdure.state.leaf_errors import type_name


@dataclass(frozen=True)
class ArrayDigest:
    """What a digest needs to know of one array. A pytree, so that a compiled step can return it.

    Attributes:
        words: `uint32[4]`, the two sums.
        dtype: The dtype of the leaf.
        shape: The shape of the array.
        nbytes: The bytes of its elements.
    """

    words: Any
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


jax.tree_util.register_pytree_node(
    ArrayDigest,
    lambda array: ((array.words,), (array.dtype, array.shape, array.nbytes)),
    lambda fixed, words: ArrayDigest(words[0], *fixed),
)


def array_digest(x: jax.Array) -> ArrayDigest:
    """The sums of an array, inside or outside of `jax.jit`.

    `digest(jax.tree.map(array_digest, state))` equals `digest(state)`, so that a step can compute the
    expensive part on the device: `return state, jax.tree.map(array_digest, state)`.

    On accelerators a sharded array stays where it is, and XLA adds the sums of its shards. On CPUs XLA
    may gather a sharded array inside of a compiled program; outside, `digest` does not.

    Args:
        x: an array of any dtype and shape, or typed keys.

    Raises:
        UnsupportedLeafError: `x` is no array of JAX.
    """
    if not isinstance(x, jax.Array):
        raise UnsupportedLeafError(
            f"array_digest: expected an array of JAX, found {type_name(x)}. "
            f"`digest` takes other arrays and scalars as they are: leave them in the tree."
        )
    units = numbers(x)
    nbytes = math.prod(units.shape) * np.dtype(units.dtype).itemsize
    return ArrayDigest(words_of_array(x), leaf_dtype(x), tuple(x.shape), nbytes)


class JaxTaker(leaf_sums.ArrayTaker):
    """Takes `ArrayDigest`s, and arrays that are not in the memory of this process as a whole."""

    def __init__(self) -> None:
        self._sums: list[Sums] = []
        self._on_device: list[tuple[int, jax.Array]] = []
        self._partial: list[int] = []

    def take(self, value: Any) -> LeafSums | LaterSums | None:
        if not isinstance(value, jax.Array):
            return _described(value) if isinstance(value, ArrayDigest) else None
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedLeafError(
                "a traced array has no bits yet. Inside of jax.jit return perdure.digests.jax_arrays."
                "array_digest(x) from the compiled step, and call `digest` outside."
            )
        if _is_in_memory(value.sharding):
            return None
        if value.is_deleted():
            return None
        array = numbers(value)
        number = len(self._sums)
        self._sums.append(np.zeros(2, np.uint64))
        if _is_on_cpu(array.sharding):
            self._sums[number] += _shard_sums(array)
            if not array.is_fully_addressable:
                self._partial.append(number)
        else:
            self._on_device.append((number, words_in_place(array)))
        nbytes = math.prod(array.shape) * np.dtype(array.dtype).itemsize
        return LaterSums(leaf_dtype(value), tuple(value.shape), nbytes, lambda: self._sums[number])

    def finish(self) -> None:
        received = jax.device_get([words for _, words in self._on_device])
        for (number, _), words in zip(self._on_device, received, strict=True):
            self._sums[number] += _sums(words)
        if self._partial:
            own = np.stack([self._sums[number] for number in self._partial]).view(np.uint32)
            of_processes = np.asarray(multihost_utils.process_allgather(own))
            totals = _sums(of_processes).sum(axis=0, dtype=np.uint64)
            for number, total in zip(self._partial, totals, strict=True):
                self._sums[number] = total


def _described(array: ArrayDigest) -> LeafSums:
    if isinstance(array.words, jax.core.Tracer):
        raise UnsupportedLeafError(
            "the digest of a traced array. Return it from the compiled step, and call `digest` outside."
        )
    first, second = _sums(np.asarray(array.words))
    return LeafSums(array.dtype, array.shape, array.nbytes, (int(first), int(second)))


def _sums(words: np.ndarray[Any, Any]) -> Sums:
    """`uint32[..., 4]` as `uint64[..., 2]`."""
    return np.ascontiguousarray(words, "<u4").view("<u8")


def _shard_sums(array: jax.Array) -> Sums:
    """What the shards of this process add to the sums; of equal shards, one process adds one."""
    total = np.zeros(2, np.uint64)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            region = tuple(
                (part.start or 0, size if part.stop is None else part.stop)
                for part, size in zip(shard.index, array.shape, strict=True)
            )
            total += region_sums(np.asarray(shard.data), region, array.shape)
    return total


@lru_cache(256)
def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


@lru_cache(256)
def _is_in_memory(sharding: jax.sharding.Sharding) -> bool:
    """Whether NumPy can see whole arrays of a sharding without a copy."""
    return _is_on_cpu(sharding) and (sharding.is_fully_replicated or len(sharding.device_set) == 1)


TAKER = JaxTaker
