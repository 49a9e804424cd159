"""Digests of JAX arrays on an accelerator, and of several shards.

The two sums are exact in `uint64`, in any order of the additions and whether x64 is enabled or not.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from perdure.digests.digest import ArrayTaker, LeafSums
from perdure.digests.memory_sums import (
    LANES,
    ROW_BYTES,
    Sums,
    lane_keys_at,
    region_sums,
    row_keys_at,
)
from perdure.state.jax_state import leaf_dtype, numbers


class JaxTaker(ArrayTaker):
    """Takes arrays that are not in the memory of this process as a whole."""

    def __init__(self) -> None:
        self._sums: list[Sums] = []
        self._on_device: list[tuple[int, jax.Array]] = []
        self._partial: list[int] = []

    def take(self, value: Any) -> LeafSums | None:
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return None
        if _is_in_memory(value.sharding) or value.is_deleted():
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
        return LeafSums(leaf_dtype(value), tuple(value.shape), nbytes, lambda: self._sums[number])

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


_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)


def words_in_place(x: Any) -> jax.Array:
    """The sums of a whole array as `uint32[4]`; XLA adds up what each device computed of its shards."""
    with jax.enable_x64(True):
        return _elementwise(_real(x))


@jax.jit
def _elementwise(x: jax.Array) -> jax.Array:
    """Every element is multiplied by its own key, so that XLA can fuse all of it into one reduction."""
    itemsize = x.dtype.itemsize
    offset = jnp.zeros(x.shape, jnp.uint64)
    for axis in range(x.ndim):
        stride = np.uint64(itemsize * math.prod(x.shape[axis + 1 :]))
        offset = offset + lax.broadcasted_iota(jnp.uint64, x.shape, axis) * stride
    row = offset // np.uint64(ROW_BYTES)
    lane = offset // np.uint64(8) % np.uint64(LANES)
    shift = offset % np.uint64(8) * np.uint64(8)
    rows = jnp.arange(x.size * itemsize // ROW_BYTES + 1, dtype=jnp.uint64)
    lanes = jnp.arange(LANES, dtype=jnp.uint64)
    elements = _units(x).astype(jnp.uint64)
    placed = elements << shift, _reversed_bytes(elements) >> shift
    sums = [
        (part * lane_keys_at(lanes, which)[lane] * row_keys_at(rows, which)[row]).sum()
        for which, part in enumerate(placed)
    ]
    return _words(sums)


def _real(x: jax.Array) -> jax.Array:
    """The array, the words of typed keys, or real and imaginary parts along a last axis."""
    x = numbers(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], axis=-1)
    return x


def _units(x: jax.Array) -> jax.Array:
    """The bits of each element as an unsigned integer of the width that it has in NumPy."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    bits = (jnp.iinfo if is_integer else jnp.finfo)(x.dtype).bits
    if bits >= 8 or not is_integer:
        x = lax.bitcast_convert_type(x, f"uint{bits}")
    return x if bits >= 8 else x.astype(jnp.uint8) & np.uint8((1 << bits) - 1)


def _reversed_bytes(words: jax.Array) -> jax.Array:
    words = ((words >> np.uint64(8)) & _BYTES) | ((words & _BYTES) << np.uint64(8))
    words = ((words >> np.uint64(16)) & _PAIRS) | ((words & _PAIRS) << np.uint64(16))
    return (words >> np.uint64(32)) | (words << np.uint64(32))


def _words(sums: list[jax.Array]) -> jax.Array:
    """Two `uint64` as `uint32[4]`, the low half of each first."""
    both = jnp.stack(sums)
    halves = jnp.stack([both & np.uint64(0xFFFFFFFF), both >> np.uint64(32)], axis=1)
    return halves.astype(jnp.uint32).reshape(4)


TAKER = JaxTaker
