"""The two sums of a digest over JAX arrays: in a program that the user compiles, and of one shard.

Both are exact in `uint64`, whatever the order of the additions and whether x64 is enabled or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from perdure.digests.position_keys import LANES, ROW_BYTES, lane_keys_at, row_keys_at
from perdure.state.jax_state import enable_x64, numbers

_LINE = 4096
"""Words of a row that are multiplied together; the sums of them are kept in the cache."""

_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)


def words_of_array(x: Any) -> jax.Array:
    """The sums of a whole array as `uint32[4]`; may be traced."""
    with enable_x64(True):
        return _words_of_units(_units(x))


def words_of_shard(shard: jax.Array, starts: Sequence[int], shape: tuple[int, ...]) -> jax.Array:
    """What a shard adds to the sums of an array of `shape`, as `uint32[4]` on the device of the shard.

    `starts` has the index in the array of the first element of the shard.
    """
    with enable_x64(True):
        return _words_of_block(shard, np.array(starts, np.uint64), shape)


@jax.jit
def _words_of_units(units: jax.Array) -> jax.Array:
    def elementwise(units: jax.Array) -> jax.Array:
        return _words(_block_sums(units, np.zeros(units.ndim, np.uint64), units.shape))

    def by_rows(units: jax.Array) -> jax.Array:
        return _words(_row_sums(units.reshape(-1)))

    return lax.platform_dependent(units, cpu=by_rows, default=elementwise)


@partial(jax.jit, static_argnums=2)
def _words_of_block(shard: jax.Array, starts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    units = _units(shard)
    added = units.ndim - shard.ndim  # a complex element has two units
    starts = jnp.concatenate([starts, jnp.zeros(added, jnp.uint64)])
    return _words(_block_sums(units, starts, (*shape, *units.shape[shard.ndim :])))


def _units(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers of the width that its elements have in NumPy."""
    x = numbers(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    bits = (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits
    if bits >= 8:
        return lax.bitcast_convert_type(x, f"uint{bits}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        x = lax.bitcast_convert_type(x, f"uint{bits}")
    return x.astype(jnp.uint8) & np.uint8((1 << bits) - 1)


def _row_sums(units: jax.Array) -> list[jax.Array]:
    """The sums of a one-dimensional array in a loop over its rows, which suits a CPU.

    XLA makes vector code of additions of equal positions, and none of a sum over neighbours.
    """
    per_word = 8 // units.dtype.itemsize
    count = units.size // (LANES * per_word)
    lanes = jnp.arange(LANES, dtype=jnp.uint64).reshape(-1, _LINE)
    keys = [lane_keys_at(lanes, which) for which in range(2)]

    def add_row(lines: tuple[jax.Array, ...], row: Any) -> tuple[tuple[jax.Array, ...], None]:
        row_units, row_keys = row
        words = _joined(row_units, per_word)
        return tuple(
            line + _weighted(words, keys[which], which) * row_keys[which]
            for which, line in enumerate(lines)
        ), None

    whole = units[: count * LANES * per_word].reshape(count, LANES // _LINE, _LINE, per_word)
    of_rows = [row_keys_at(jnp.arange(count + 1, dtype=jnp.uint64), which) for which in range(2)]
    empty = jnp.zeros(_LINE, jnp.uint64)
    lines = (empty, empty)
    if count:
        scanned = whole, jnp.stack([keys[:count] for keys in of_rows], axis=1)
        lines, _ = lax.scan(add_row, lines, scanned)
    if rest := units.size - whole.size:
        tail = units[whole.size :]
        length = min(_LINE, -(-rest // per_word))
        padded = jnp.pad(tail, (0, -rest % (length * per_word))).reshape(-1, length, per_word)
        words = _joined(padded, per_word)
        lines = tuple(
            line.at[:length].add(
                _weighted(words, keys[which][: len(words), :length], which) * of_rows[which][count]
            )
            for which, line in enumerate(lines)
        )
    return [line.sum() for line in lines]


def _joined(units: jax.Array, per_word: int) -> jax.Array:
    """Words of units of `[..., per_word]`."""
    return lax.bitcast_convert_type(units, jnp.uint64) if per_word > 1 else units[..., 0]


def _weighted(words: jax.Array, keys: jax.Array, which: int) -> jax.Array:
    """The sum over the first axis of words times keys."""
    total = 0
    for line, line_keys in zip(words, keys, strict=True):
        total = total + (_reversed_bytes(line) if which else line) * line_keys
    return jnp.asarray(total)


def _block_sums(units: jax.Array, starts: Any, shape: tuple[int, ...]) -> list[jax.Array]:
    """The sums of the block of an array of `shape` that begins at index `starts`.

    Every element is multiplied by its own key, so that XLA can fuse everything into one reduction,
    and leave a sharded array where it is. On a CPU this is thirty times slower than `_row_sums`.
    """
    itemsize = units.dtype.itemsize
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(units.ndim)]
    first = sum((starts[axis] * np.uint64(s) for axis, s in enumerate(strides)), np.uint64(0))
    offset = jnp.broadcast_to(first, units.shape)
    for axis, stride in enumerate(strides):
        offset = offset + lax.broadcasted_iota(jnp.uint64, units.shape, axis) * np.uint64(stride)
    span = sum((size - 1) * stride for size, stride in zip(units.shape, strides, strict=True))
    first_row = first // np.uint64(ROW_BYTES)
    rows = first_row + jnp.arange(max(0, span) // ROW_BYTES + 2, dtype=jnp.uint64)
    row = offset // np.uint64(ROW_BYTES) - first_row
    lane = offset // np.uint64(8) % np.uint64(LANES)
    shift = offset % np.uint64(8) * np.uint64(8)
    lanes = jnp.arange(LANES, dtype=jnp.uint64)
    elements = units.astype(jnp.uint64)
    placed = elements << shift, _reversed_bytes(elements) >> shift
    return [
        (part * lane_keys_at(lanes, which)[lane] * row_keys_at(rows, which)[row]).sum()
        for which, part in enumerate(placed)
    ]


def _reversed_bytes(words: jax.Array) -> jax.Array:
    words = ((words >> np.uint64(8)) & _BYTES) | ((words & _BYTES) << np.uint64(8))
    words = ((words >> np.uint64(16)) & _PAIRS) | ((words & _PAIRS) << np.uint64(16))
    return (words >> np.uint64(32)) | (words << np.uint64(32))


def _words(sums: list[jax.Array]) -> jax.Array:
    """Two `uint64` as `uint32[4]`, the low half of each first."""
    both = jnp.stack(sums)
    halves = jnp.stack([both & np.uint64(0xFFFFFFFF), both >> np.uint64(32)], axis=1)
    return halves.astype(jnp.uint32).reshape(4)
