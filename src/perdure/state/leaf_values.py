"""Python scalars and NumPy arrays as leaves, and back, with exactly the same bits; casts of leaves."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.leaf_spec import LeafSpec, type_name
from perdure.store.format import SCALAR_PREFIX, WEAK_PREFIX
from perdure.store.leaf import Leaf, numpy_dtype
from perdure.store.shard_plan import Region

# Below the limits of `sys.set_int_max_str_digits`, which cannot be set lower than 640 digits.
_LONG_BITS = 2000
_LONG_DIGITS = 600


def _int_to_text(number: int) -> str:
    """Decimal digits. `str` refuses numbers of more than 4,300 digits; `Decimal` is exact too."""
    return str(number) if number.bit_length() < _LONG_BITS else str(Decimal(number))


def _int_from_text(digits: str) -> int:
    return int(digits) if len(digits) < _LONG_DIGITS else int(Decimal(digits))


class ScalarType(NamedTuple):
    """How the values of one Python type are stored: as a leaf of `dtype` whose data is text."""

    dtype: str
    to_text: Callable[[Any], str]
    from_text: Callable[[str], Any]


SCALARS: dict[type, ScalarType] = {
    bool: ScalarType("py:bool", lambda x: "true" if x else "false", lambda text: text == "true"),
    int: ScalarType("py:int", _int_to_text, _int_from_text),
    float: ScalarType("py:float", repr, float),
    complex: ScalarType("py:complex", repr, complex),
    str: ScalarType("py:str", str, str),
    bytes: ScalarType("py:bytes", bytes.hex, bytes.fromhex),
    type(None): ScalarType("py:none", lambda _: "", lambda _: None),
}
SCALAR_TYPES = tuple(SCALARS)
CONTAINERS = (tuple, list, dict, deque, set, frozenset)
_BY_DTYPE = {scalar.dtype: scalar for scalar in SCALARS.values()}
_SMALL_BYTES = 4096
"""So few are compared faster as copies than as NumPy arrays."""

_COMPARED_BYTES = 256 * 1024

_LITTLE = sys.byteorder == "little"
BUFFER_DTYPES = {np.dtype(char): np.dtype(char).name for char in "?bBhHiIlLqQefd" if _LITTLE}
"""Names of the dtypes whose memory a memoryview can show as the bytes of a checkpoint."""

COPIED_BYTES = 1024
"""The bytes of an array of at most this size are copied, which costs less than to share its memory."""


def scalar_leaf(value: Any) -> Leaf:
    """The leaf of a Python scalar, whose type must be in `SCALARS`."""
    scalar = SCALARS[type(value)]
    try:
        data = scalar.to_text(value).encode()
    except UnicodeEncodeError:
        raise UnsupportedLeafError(f"the string {value!r} is not valid Unicode.") from None
    return Leaf(scalar.dtype, (), data, frozen=True)


def scalar_text(value: Any) -> tuple[str, str]:
    """dtype and text of a Python scalar; raises `TypeError` for any other value."""
    if type(value) not in SCALARS:
        raise TypeError(value)
    scalar = SCALARS[type(value)]
    return scalar.dtype, scalar.to_text(value)


def is_plain(value: Any) -> bool:
    """Whether a value is a NumPy array or a Python number, with which any framework computes."""
    return isinstance(value, (np.ndarray, np.generic, bool, int, float, complex))


def array_spec(array: np.ndarray[Any, Any] | np.generic) -> LeafSpec:
    """dtype and shape; raises `UnsupportedLeafError` for an array that cannot be restored exactly."""
    return LeafSpec(_checked_name(array), array.shape)


def array_leaf(array: np.ndarray[Any, Any] | np.generic) -> Leaf:
    """The bytes of a NumPy array or scalar, without a copy where possible."""
    name = _checked_name(array)
    data, is_copy = array_bytes(array)
    axes = None if array.flags.c_contiguous else memory_axes(array.shape, array.strides)
    return Leaf(name, array.shape, data, is_copy or isinstance(array, np.generic), axes=axes)


def memory_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes by falling stride; None for the order of the shape, or if elements share memory."""
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis] < 2, -abs(strides[axis])))
    longer = [axis for axis in order if shape[axis] > 1]
    is_row_major = longer == sorted(longer) or not all(strides[axis] for axis in longer)
    return None if is_row_major else tuple(order)


def array_bytes(array: np.ndarray[Any, Any] | np.generic) -> tuple[memoryview, bool]:
    """The bytes of an array, row-major and little-endian, and whether they are a copy."""
    array = np.asarray(array)
    if not array.size:
        return memoryview(b""), True
    is_copy = not (_LITTLE and array.dtype.isnative and array.flags.c_contiguous)
    if is_copy:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))  # has one axis at least
    elif array.dtype in BUFFER_DTYPES:
        return array.data.cast("B"), False
    return array.reshape(-1).view(np.uint8).data, is_copy


def leaf_array(leaf: Leaf) -> np.ndarray[Any, Any]:
    """A NumPy array over the bytes of an array leaf, which are not copied."""
    return np.frombuffer(leaf.data, numpy_dtype(leaf.dtype)).reshape(leaf.shape)


def plain_value(leaf: Leaf) -> Any:
    """A leaf without a target: a Python scalar or a NumPy array (of JAX keys the `uint32` words)."""
    if leaf.is_scalar:
        return _BY_DTYPE[leaf.dtype].from_text(leaf.text)
    if leaf.dtype.startswith("key<"):
        return key_words(leaf)
    return leaf_array(leaf)


def key_words(leaf: Leaf) -> np.ndarray[Any, Any]:
    """The `uint32` words of typed PRNG keys, `[*shape, words of one key]`; 0 words without a key."""
    words = np.frombuffer(leaf.data, np.uint32)
    return words.reshape((*leaf.shape, words.size // max(1, math.prod(leaf.shape))))


def same_bits(stored: Leaf, present: Leaf) -> bool:
    """Whether two leaves are equal bit for bit; a number may have become another kind of number."""
    if (stored.dtype, stored.shape) == (present.dtype, present.shape):
        if stored.shards is not None and present.shards is not None:
            pairs = zip(stored.shards.parts, present.shards.parts, strict=False)
            is_same = stored.shards.regions == present.shards.regions
            return is_same and all(_same_bytes(one, other) for one, other in pairs)
        return _same_bytes(stored.data, present.data)
    if stored.shape or present.shape or not (stored.is_scalar or present.is_scalar):
        return False
    with suppress(StateError, ValueError, TypeError):  # a value that is not a number differs
        first, second = (np.asarray(plain_value(leaf)).item() for leaf in (stored, present))
        numbers = (bool, int, float)
        return isinstance(first, numbers) and isinstance(second, numbers) and first == second
    return False


def _same_bytes(one: memoryview | bytes, other: memoryview | bytes) -> bool:
    if len(one) != len(other):
        return False
    if len(one) <= _SMALL_BYTES:
        return bytes(one) == bytes(other)
    first, second = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    if first.ctypes.data == second.ctypes.data:  # an object that took the memory of the leaf
        return True
    # In pieces that stay in a cache, and in words: the whole in bytes takes three times as long.
    for start in range(0, len(first), _COMPARED_BYTES):
        piece = slice(start, start + _COMPARED_BYTES)
        a, b = first[piece], second[piece]
        if len(a) % 8 == 0:
            a, b = a.view(np.uint64), b.view(np.uint64)
        if not np.array_equal(a, b):
            return False
    return True


def _checked_name(value: np.ndarray[Any, Any] | np.generic) -> str:
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return _dtype_name(value.dtype)
    raise UnsupportedLeafError(
        f"a {type_name(value)} would come back as a plain NumPy array. Expected numpy.ndarray or "
        f"numpy.ma.MaskedArray: convert it with `numpy.array(x)`."
    )


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    numeric = dtype.kind in "biufc" or (
        dtype.kind == "V" and dtype.names is None and dtype.num >= 256
    )
    if not numeric or (dtype.kind in "fc" and dtype.char in "gG"):
        raise UnsupportedLeafError(
            f"a NumPy array of dtype {dtype} has no exact form in a checkpoint; expected booleans, "
            f"integers, floats or complex numbers of a fixed width. Convert it, or leave it out."
        )
    return dtype.name


def cut(leaf: Leaf, region: Region) -> Leaf:
    """The part of a leaf that has the elements in `region`: of a whole one, or one of its shards."""
    if leaf.shards is not None:
        data = leaf.shards.parts[leaf.shards.regions.index(region)]
        return Leaf(leaf.dtype, leaf.shape, data, region=region)
    if not leaf.nbytes:
        return leaf
    element = leaf.nbytes // int(np.prod(leaf.shape))
    array = np.frombuffer(leaf.data, f"V{element}").reshape(leaf.shape)
    part = np.ascontiguousarray(array[tuple(slice(*span) for span in region)])
    data = part.reshape(-1).view(np.uint8).data if part.size else memoryview(b"")
    return Leaf(leaf.dtype, leaf.shape, data, region=region)


def cast_leaf(leaf: Leaf, spec: LeafSpec) -> Leaf:
    """`leaf` with the dtype of `spec`: floats rounded to nearest, ties to even; integers keep their
    values. Raises `StateError` if more than precision would be lost."""
    kind = _kind(leaf.dtype)
    refused = f"cast=True does not convert {leaf.dtype} to {spec.dtype}"
    if kind is None or kind != _kind(spec.dtype):
        raise StateError(f"{refused}; it converts floats to floats and integers to integers")
    source: Any = np.asarray(plain_value(leaf)) if leaf.is_scalar else leaf_array(leaf)
    dtype = numpy_dtype(spec.dtype)
    if kind == "int":
        import ml_dtypes

        limits = ml_dtypes.iinfo(dtype)
        values = (int(source.min()), int(source.max())) if source.size else (0, 0)
        if values[0] < limits.min or values[1] > limits.max:
            raise StateError(f"{refused}: it has values from {values[0]} to {values[1]}")
    with np.errstate(all="ignore"):
        result = source.astype(dtype)
        if kind != "int" and (np.isfinite(source) & ~np.isfinite(result)).any():
            raise StateError(f"{refused}: a finite value would become infinite or NaN")
    return Leaf(spec.dtype, leaf.shape, array_bytes(result)[0], frozen=True)


def _kind(dtype: str) -> str | None:
    name = dtype.removeprefix(WEAK_PREFIX).removeprefix(SCALAR_PREFIX)
    kinds = {"float": "float", "bfloat": "float", "int": "int", "uint": "int", "complex": "complex"}
    return kinds.get(name.partition("_")[0].rstrip("0123456789"))
