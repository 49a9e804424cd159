"""Leaves and nodes of plain Python and NumPy: scalars, strings, arrays, containers, dataclasses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node, Spec
from perdure.state.generators import generator_node
from perdure.state.iterator import is_positioned, position, reposition
from perdure.store.leaf import Leaf

_SCALARS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bool: ("py:bool", lambda x: "true" if x else "false", lambda t: t == "true"),
    int: ("py:int", str, int),
    float: ("py:float", repr, float),
    complex: ("py:complex", repr, complex),
    str: ("py:str", str, str),
    bytes: ("py:bytes", bytes.hex, bytes.fromhex),
    type(None): ("py:none", lambda _: "", lambda _: None),
}
_LITTLE = sys.byteorder == "little"
# dtypes whose memory, in native order, a memoryview can show as the bytes of a checkpoint
_PLAIN = {char: np.dtype(char).name for char in "?bBhHiIlLqQefd"} if _LITTLE else {}
_BY_NAME = {name: parse for name, _, parse in _SCALARS.values()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a leaf's dtype name, ml_dtypes (bfloat16, float8) included."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        try:
            return np.dtype(getattr(ml_dtypes, name))
        except AttributeError:
            raise UnsupportedLeafError(
                f"dtype {name!r} has no NumPy form here; restore into a template of the framework "
                f"that wrote it."
            ) from None


def array_spec(value: np.ndarray[Any, Any] | np.generic) -> Spec:
    """dtype and shape; raises `UnsupportedLeafError` for dtypes without exact bytes."""
    return Spec(_dtype_name(value.dtype), value.shape)


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


def array_leaf(value: np.ndarray[Any, Any] | np.generic, *, frozen: bool = False) -> Leaf:
    """The bytes of a NumPy array, row-major and little-endian, without a copy where possible."""
    dtype = _dtype_name(value.dtype)
    array = np.asarray(value)
    if not array.size:
        return Leaf(dtype, array.shape, memoryview(b""), True)
    if isinstance(value, np.generic):
        frozen = True
    if not (_LITTLE and array.dtype.isnative and array.flags.c_contiguous):
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return Leaf(dtype, array.shape, little.reshape(-1).view(np.uint8).data, True)
    return Leaf(dtype, array.shape, array.reshape(-1).view(np.uint8).data, frozen)


def leaf_array(leaf: Leaf) -> np.ndarray[Any, Any]:
    """A NumPy array over the bytes of an array leaf."""
    return np.frombuffer(leaf.data, numpy_dtype(leaf.dtype)).reshape(leaf.shape)


def plain_value(leaf: Leaf) -> Any:
    """A leaf without a template: a Python scalar, or a NumPy array (keys as their words)."""
    if leaf.is_scalar:
        return _BY_NAME[leaf.dtype](leaf.text)
    if leaf.dtype.startswith("key<"):
        return np.frombuffer(leaf.data, np.uint32).reshape((*leaf.shape, -1))
    return leaf_array(leaf)


@dataclasses.dataclass(frozen=True)
class Beside:
    """A state with more beside it; the leaf paths of `main` are those that it has alone."""

    main: Any
    extras: Mapping[str, Any]


class Builtin:
    """The adapter that needs no framework."""

    def spec(self, value: Any) -> Spec | None:
        if type(value) in _SCALARS:
            return Spec(_SCALARS[type(value)][0], ())
        if isinstance(value, (np.ndarray, np.generic)):
            return array_spec(value)
        return None

    def leaf(self, value: Any) -> Leaf | None:
        if type(value) is np.ndarray:  # nearly all there are, so without a detour
            dtype = value.dtype
            name = _PLAIN.get(dtype.char) if dtype.isnative else None
            if name is not None and value.flags.c_contiguous and value.size:
                return Leaf(name, value.shape, value.data.cast("B"), False)
            return array_leaf(value)
        if type(value) in _SCALARS:
            name, text, _ = _SCALARS[type(value)]
            try:
                data = text(value).encode()
            except UnicodeEncodeError:
                raise UnsupportedLeafError(f"the string {value!r} is not valid Unicode.") from None
            return Leaf(name, (), memoryview(data), frozen=True)
        if isinstance(value, (np.ndarray, np.generic)):
            return array_leaf(value)
        return None

    def load(self, like: Any, leaf: Leaf) -> Any:
        if leaf.is_scalar:
            return plain_value(leaf)
        array = leaf_array(leaf)
        if isinstance(like, np.generic) or type(like) in _SCALARS:
            return array[()]
        return array.astype(like.dtype, copy=False)  # the byte order of the target

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        if isinstance(value, Mapping):
            keys = list(value)
            return Node(
                # A plain name is not asked about: there may be very many.
                [(key if type(key) is str and key else _key_name(key), value[key]) for key in keys],
                lambda new: _same_mapping(value, dict(zip(keys, new, strict=True))),
            )
        fields = getattr(value, "_fields", None)
        if isinstance(value, tuple) and fields is not None:
            return Node(
                [(field, getattr(value, field)) for field in fields],
                lambda new: type(value)(*new),
            )
        if isinstance(value, (list, tuple)):
            return Node([(str(i), child) for i, child in enumerate(value)], type(value))
        if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
            return Node([("", value.state_dict())], lambda new: _loaded(value, new[0]))
        if is_positioned(value):
            return Node([("", position(value))], lambda new: reposition(value, new[0]))
        if isinstance(value, Beside):
            return Node(
                [("", value.main), *value.extras.items()],
                lambda new: Beside(new[0], dict(zip(value.extras, new[1:], strict=True))),
            )
        if (node := generator_node(value, stored)) is not None:
            return node
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            return Node(
                [(name, getattr(value, name)) for name in names],
                lambda new: dataclasses.replace(value, **dict(zip(names, new, strict=True))),
            )
        return None


def _key_name(key: object) -> str:
    if isinstance(key, (str, int)) and not isinstance(key, bool) and key != "":
        return str(key)
    raise UnsupportedLeafError(
        f"a mapping has the key {key!r}; expected a non-empty string or an integer, because keys "
        f"become leaf paths."
    )


def _same_mapping(like: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    if type(like) is dict:
        return new
    if hasattr(like, "default_factory"):
        return type(like)(like.default_factory, new)  # type: ignore[call-arg]
    return type(like)(new)  # type: ignore[call-arg]


def _loaded(target: Any, state: Any) -> Any:
    target.load_state_dict(state)
    return target
