"""Digests of JAX arrays: inside of a compiled step, on an accelerator, and of several shards.

The two sums are exact in `uint64`, in any order of the additions and whether x64 is enabled or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from perdure.digests.digest import ArrayTaker, LaterSums, LeafSums
from perdure.digests.memory_sums import (
    LANES,
    ROW_BYTES,
    Sums,
    lane_keys_at,
    region_sums,
    row_keys_at,
)
from perdure.errors import UnsupportedLeafError
from perdure.state.jax_state import leaf_dtype, numbers
from perdure.state.leaf_spec import type_name


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


class JaxTaker(ArrayTaker):
    """Takes `ArrayDigest`s, and arrays that are not in the memory of this process as a whole."""

    def __init__(self) -> None:
        self._sums: list[Sums] = []
        self._on_device: list[tuple[int, jax.Array]] = []
        self._partial: list[int] = []

    def is_digest(self, value: Any) -> bool:
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedLeafError(
                "a traced array has no bits yet. Inside of jax.jit return perdure.digests.jax_arrays."
                "array_digest(x) from the compiled step, and call `digest` outside."
            )
        return isinstance(value, ArrayDigest)

    def take(self, value: Any) -> LeafSums | LaterSums | None:
        if not isinstance(value, jax.Array):
            return _described(value) if isinstance(value, ArrayDigest) else None
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


_LINE = 4096
"""Words of a row that are multiplied together; the sums of them are kept in the cache."""

_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)


def words_of_array(x: Any) -> jax.Array:
    """The sums of a whole array as `uint32[4]`; may be traced."""
    with jax.enable_x64(True):
        return _for_platform(_real(x))


def words_in_place(x: Any) -> jax.Array:
    """`words_of_array`, whose shards stay where they are: XLA adds up what each device computed.

    On a CPU this is thirty times slower than `words_of_array`.
    """
    with jax.enable_x64(True):
        return _elementwise(_real(x))


@jax.jit
def _for_platform(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cpu=_by_rows, default=_elementwise)


@jax.jit
def _by_rows(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize < 4:
        # XLA gathers small floats as float32 on CPUs, which changes the bits of signalling NaNs.
        x = _units(x)
    return _words(_row_sums(x.reshape(-1)))


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


def _row_sums(x: jax.Array) -> list[jax.Array]:
    """The sums of a one-dimensional array in a loop over its rows, which suits a CPU.

    XLA makes vector code of additions of equal positions, and none of a sum over neighbours. The bits
    are taken inside of the loop, because XLA would copy the whole array otherwise.
    """
    per_word = 8 // x.dtype.itemsize
    count = x.size // (LANES * per_word)
    lanes = jnp.arange(LANES, dtype=jnp.uint64).reshape(-1, _LINE)
    keys = [lane_keys_at(lanes, which) for which in range(2)]
    rows = jnp.arange(count + 1, dtype=jnp.uint64)
    of_rows = jnp.stack([row_keys_at(rows, which) for which in range(2)], axis=1)
    lines = (jnp.zeros(_LINE, jnp.uint64),) * 2
    if count:

        def add_row(lines: Any, row: Any) -> tuple[Any, None]:
            elements, row_keys = row
            words = _joined(elements)
            return tuple(
                line + _weighted(words, keys[which], which) * row_keys[which]
                for which, line in enumerate(lines)
            ), None

        whole = x[: count * LANES * per_word].reshape(count, LANES // _LINE, _LINE, per_word)
        lines, _ = lax.scan(add_row, lines, (whole, of_rows[:count]))
    sums = [line.sum() for line in lines]
    if rest := x.size - count * LANES * per_word:
        length = min(_LINE, -(-rest // per_word))
        tail = jnp.pad(_units(x[-rest:]), (0, -rest % (length * per_word)))
        words = _joined(tail.reshape(-1, length, per_word))
        for which in range(2):
            line = _weighted(words, keys[which][: len(words), :length], which)
            sums[which] += (line * of_rows[count, which]).sum()
    return sums


def _joined(elements: jax.Array) -> jax.Array:
    """The words of elements whose last axis has those of one word."""
    units = _units(elements)
    return lax.bitcast_convert_type(units, jnp.uint64) if units.shape[-1] > 1 else units[..., 0]


def _weighted(words: jax.Array, keys: jax.Array, which: int) -> jax.Array:
    """The sum over the first axis of words times keys."""
    total = 0
    for line, line_keys in zip(words, keys, strict=True):
        total = total + (_reversed_bytes(line) if which else line) * line_keys
    return jnp.asarray(total)


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
