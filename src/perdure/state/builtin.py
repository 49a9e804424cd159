"""Leaves and nodes of plain Python and NumPy: scalars, strings, arrays, containers, dataclasses."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node, NoVariables, Spec, Stateful
from perdure.state.generators import generator_node
from perdure.state.iterator import is_positioned, position, reposition
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf


def _digits(number: int) -> str:
    """Decimal digits. `str` refuses numbers of more than 4,300 digits; `Decimal` is exact too."""
    return str(number) if number.bit_length() < _LONG_BITS else str(Decimal(number))


def _number(digits: str) -> int:
    return int(digits) if len(digits) < _LONG_DIGITS else int(Decimal(digits))


# Below the limits of `sys.set_int_max_str_digits`, which cannot be set lower than 640 digits.
_LONG_BITS = 2000
_LONG_DIGITS = 600

_SCALARS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bool: ("py:bool", lambda x: "true" if x else "false", lambda t: t == "true"),
    int: ("py:int", _digits, _number),
    float: ("py:float", repr, float),
    complex: ("py:complex", repr, complex),
    str: ("py:str", str, str),
    bytes: ("py:bytes", bytes.hex, bytes.fromhex),
    type(None): ("py:none", lambda _: "", lambda _: None),
}
_LITTLE = sys.byteorder == "little"
# dtypes whose memory, in native order, a memoryview can show as the bytes of a checkpoint
_PLAIN = {char: np.dtype(char).name for char in "?bBhHiIlLqQefd"} if _LITTLE else {}
# Mappings that `_same_mapping` makes again exactly; any other one is tried at the save.
_MAPPINGS = {dict, OrderedDict, defaultdict, Counter, MappingProxyType}
_BY_NAME = {name: parse for name, _, parse in _SCALARS.values()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a leaf's dtype name, ml_dtypes (bfloat16, float8) included."""
    name = name.removeprefix(WEAK_PREFIX)
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
    _check_array_type(value)
    return Spec(_dtype_name(value.dtype), value.shape)


def _check_array_type(value: np.ndarray[Any, Any] | np.generic) -> None:
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return
    raise UnsupportedLeafError(
        f"a {type(value).__module__}.{type(value).__qualname__} would come back as a plain NumPy "
        f"array. Expected numpy.ndarray or numpy.ma.MaskedArray: convert it with `numpy.array(x)`."
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
        return key_words(leaf)
    return leaf_array(leaf)


def key_words(leaf: Leaf) -> np.ndarray[Any, Any]:
    """The `uint32` words of typed PRNG keys, `[*shape, words of one key]`; 0 words without a key."""
    words = np.frombuffer(leaf.data, np.uint32)
    return words.reshape((*leaf.shape, words.size // max(1, math.prod(leaf.shape))))


@dataclasses.dataclass(frozen=True)
class Beside:
    """A state with more beside it; the leaf paths of `main` are those that it has alone."""

    main: Any
    extras: Mapping[str, Any]


class Members:
    """Base of an object whose attributes are members of a state, each with its own path."""


class Builtin(NoVariables):
    """The adapter that needs no framework."""

    def spec(self, value: Any) -> Spec | None:
        if type(value) in _SCALARS:
            return Spec(_SCALARS[type(value)][0], ())
        if isinstance(value, (np.ndarray, np.generic)) and type(value) is not np.ma.MaskedArray:
            return array_spec(value)
        return None

    def leaf(self, value: Any) -> Leaf | None:
        if type(value) is np.ndarray:  # nearly all there are, so without a detour
            dtype = value.dtype
            # Types of ml_dtypes share letters with NumPy's own, and only those are built in.
            name = _PLAIN.get(dtype.char) if dtype.isbuiltin == 1 and dtype.isnative else None
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
        if isinstance(value, (np.ndarray, np.generic)) and type(value) is not np.ma.MaskedArray:
            _check_array_type(value)
            return array_leaf(value)
        return None

    def load(self, like: Any, leaf: Leaf) -> Any:
        if leaf.is_scalar:
            return plain_value(leaf)
        array = leaf_array(leaf)
        if isinstance(like, np.generic) or type(like) in _SCALARS:
            return array[()]
        if like.flags.c_contiguous:
            # The byte order of the target. The bytes of a snapshot may be those of something frozen.
            return array.astype(like.dtype, copy=not array.flags.writeable)
        # The memory order of the target too: the order in which NumPy adds depends on it.
        ordered = np.empty_like(like)
        ordered[...] = array
        return ordered

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | Stateful | None:
        if type(value) is bytearray:
            return Node([("", bytes(value))], lambda new: bytearray(new[0]))
        if isinstance(value, Mapping):
            if type(value) not in _MAPPINGS:
                _check_rebuilt(value, partial(_same_mapping, value), dict(value))
            keys = list(value)
            # A plain name needs no check: there may be very many.
            names = [key if type(key) is str and key else key_name(key) for key in keys]
            if names != keys and len(set(names)) < len(names):
                twice = next(name for name, count in Counter(names).items() if count > 1)
                raise UnsupportedLeafError(
                    f"a mapping has several keys that are {twice!r} in a leaf path, such as a number "
                    f"and its text. Rename all but one of them."
                )
            return Node(
                list(zip(names, value.values(), strict=True)),
                lambda new: _same_mapping(value, dict(zip(keys, new, strict=True))),
            )
        fields = getattr(value, "_fields", None)
        if isinstance(value, tuple) and fields is not None:
            make = type(value)._make  # type: ignore[attr-defined]
            if getattr(value, "__dict__", None):
                _check_rebuilt(value, make, tuple(value))
            return Node([(field, getattr(value, field)) for field in fields], make)
        if isinstance(value, (list, tuple)):
            if type(value) not in (list, tuple):
                _check_rebuilt(value, type(value), list(value))
            return Node([(str(i), child) for i, child in enumerate(value)], type(value))
        if isinstance(value, Members):
            names = list(vars(value))
            return Node(
                [(name, getattr(value, name)) for name in names],
                lambda new: vars(value).update(zip(names, new, strict=True)),
                in_place=True,
            )
        if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
            return Stateful(value)
        if is_positioned(value):
            return _Positioned(value)
        if isinstance(value, Beside):
            return Node(
                [("", value.main), *value.extras.items()],
                lambda new: Beside(new[0], dict(zip(value.extras, new[1:], strict=True))),
            )
        if (node := generator_node(value, stored)) is not None:
            return node
        if type(value) is np.ma.MaskedArray:
            return _masked(value, stored)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _dataclass(value)
        return None


def is_plain(value: Any) -> bool:
    """Whether a leaf is a NumPy array or a number of Python's, which any framework computes with."""
    return isinstance(value, (np.ndarray, np.generic, bool, int, float, complex))


def scalar_text(value: Any) -> tuple[str, str]:
    """Kind and text of a Python scalar; raises TypeError for any other value."""
    if type(value) not in _SCALARS:
        raise TypeError(value)
    name, text, _ = _SCALARS[type(value)]
    return name, text(value)


def key_name(key: object) -> str:
    """A key of a mapping as text; raises `UnsupportedLeafError` for one that has no place in a path."""
    if isinstance(key, (str, int)) and not isinstance(key, bool) and key != "":
        return str(key)
    raise UnsupportedLeafError(
        f"a mapping has the key {key!r}; expected a non-empty string or an integer, because keys "
        f"become leaf paths."
    )


def _check_rebuilt(value: Any, rebuild: Callable[[Any], Any], items: Any) -> None:
    """Raise unless a container of a subclass is all that its items say.

    A subclass may hold more than its items. So `rebuild` makes a second one from them, which must
    have the same type, length and attributes.
    """
    kind = type(value)
    try:
        twin = rebuild(items)
        same = type(twin) is kind and len(twin) == len(value)
        same = same and getattr(twin, "__dict__", {}) == getattr(value, "__dict__", {})
    except Exception:  # noqa: BLE001 - a constructor of the user's may raise anything
        same = False
    if not same:
        raise UnsupportedLeafError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be made again from its items alone. "
            f"Convert it to a plain dict, list or tuple, or register it as a JAX pytree node."
        )


def _masked(value: Any, stored: Mapping[str, Spec] | None) -> Node:
    """A masked array: its data below the mask too, and a mask of one `False` if nothing is masked."""
    mask = value.mask
    if stored is not None and "mask" in stored:  # a mask may appear and vanish as a program runs
        mask = np.zeros(stored["mask"].shape, bool)
    children = {
        "data": value.data,
        "mask": np.asarray(mask),
        "fill_value": value.fill_value,
        "hard_mask": value.hardmask,
    }

    def rebuild(new: list[Any]) -> Any:
        data, mask, fill_value, hard_mask = new
        return np.ma.MaskedArray(
            data, mask if mask.shape or mask else np.ma.nomask, fill_value=fill_value,
            hard_mask=hard_mask,
        )  # fmt: skip

    return Node(list(children.items()), rebuild)


def _dataclass(value: Any) -> Node:
    """Every attribute of the instance, a field of `__init__` or not; `__post_init__` does not run.

    Values that `functools.cached_property` keeps are left out: they are computed again.
    """
    kind = type(value)
    try:
        object.__new__(kind)
        attributes: Any = object.__getstate__(value)  # type: ignore[attr-defined]
    except TypeError as error:
        raise UnsupportedLeafError(
            f"a dataclass {kind.__module__}.{kind.__qualname__} cannot be made again without its "
            f"`__init__` ({error}). Give it `state_dict` and `load_state_dict`."
        ) from None
    parts = attributes if isinstance(attributes, tuple) else (attributes,)  # __dict__, then slots
    found: dict[str, Any] = {}
    for part in parts:
        found.update(part or {})
    for field in dataclasses.fields(value):  # those whose value is the default of the class, too
        if field.name not in found and hasattr(value, field.name):
            found[field.name] = getattr(value, field.name)
    of_typing = {name: found[name] for name in found if name.startswith("__")}
    names = [
        name
        for name in found
        if name not in of_typing and not isinstance(getattr(kind, name, None), cached_property)
    ]

    def rebuild(new: list[Any]) -> Any:
        made = object.__new__(kind)
        for name, part in (*of_typing.items(), *zip(names, new, strict=True)):
            object.__setattr__(made, name, part)  # also of a frozen one
        return made

    return Node([(name, found[name]) for name in names], rebuild)


def _same_mapping(like: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    if type(like) is dict:
        return new
    if hasattr(like, "default_factory"):
        return type(like)(like.default_factory, new)  # type: ignore[call-arg]
    return type(like)(new)  # type: ignore[call-arg]


class _Positioned(Stateful):
    """An iterator that can be put back (`get_state` and `set_state`)."""

    def read(self) -> Any:
        return position(self.target)

    def load(self, state: Any) -> None:
        reposition(self.target, state)
