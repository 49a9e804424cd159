"""The values in an object's state as entries of a manifest, and back without the object."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.leaf_spec import type_name
from perdure.state.leaf_values import scalar_text
from perdure.state.paths import key_text
from perdure.state.program_code import is_made_of_attributes, is_user_class
from perdure.state.value_forms import (
    Form,
    class_named,
    encode_forms,
    is_named,
    listed_form,
    set_attributes,
)
from perdure.store.format import escape, unescape
from perdure.store.manifest import MAPPINGS, OF_TARGET, Container

ANY_LENGTH = (deque, set, frozenset)
_SEQUENCES = (list, tuple, *ANY_LENGTH)
_FACTORIES: dict[Any, str] = {
    factory: factory.__name__ for factory in (bool, dict, float, int, list, set, str, tuple)
}
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (OrderedDict, Counter, list, tuple, set, frozenset)
}
PLAIN_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
"""Those whose keys may be anything that has an exact form (`q[state, action]`)."""
BYTEARRAY = "builtins.bytearray"
"""The class in the entry of a leaf of bytes that is a `bytearray`."""
_NO_BASES = ("builtins", "abc", "typing")
SORTED_DICT = Container("dict")
"""A dict whose keys are strings in code point order. It needs no entry."""


def describe_container(value: Any) -> tuple[Container, Sequence[tuple[str, Any]]] | None:
    """The manifest entry of a plain container, and its elements by key; None for any other value,
    also of a subclass, whose methods and fields cannot be rebuilt."""
    kind = type(value)
    if kind in PLAIN_MAPPINGS and not is_named(value):
        return describe_container(listed_form(value))
    if kind is Form or kind in PLAIN_MAPPINGS:
        made_by = getattr(value, "default_factory", None)
        factory: Any = None if made_by is None else _FACTORIES.get(made_by, OF_TARGET)
        name: Any = "dict" if kind is Form else kind.__name__
        entry = Container(name, keys=_keys(value), factory=factory)
        names = (key if type(key) is str and key else key_text(key) for key in value)
        return entry, list(zip(names, value.values(), strict=True))
    if kind is set or kind is frozenset:
        try:
            value = sorted(value, key=_order)
        except TypeError:
            raise UnsupportedLeafError(
                "a set of values other than Python scalars and tuples of them has no exact form; use "
                "a list."
            ) from None
    if kind in _SEQUENCES:
        entry = Container(kind.__name__, maxlen=getattr(value, "maxlen", None))  # type: ignore[arg-type]
        return entry, [(str(i), child) for i, child in enumerate(value)]
    if kind.__qualname__ == "Size" and kind.__module__ == "torch":
        return Container("torch.Size"), [(str(i), child) for i, child in enumerate(value)]
    return None


def _order(value: Any) -> tuple[str, Any]:
    """By what the elements of a set are sorted: tuples are after scalars, by their own elements."""
    return ("tuple", [*map(_order, value)]) if type(value) is tuple else scalar_text(value)


def describe_record(value: Any) -> tuple[Container, Sequence[tuple[str, Any]]] | None:
    """As `describe_container`, of a named tuple or a dataclass, by its class and fields."""
    kind = type(value)
    fields: Any = getattr(kind, "_fields", None) if isinstance(value, tuple) else None
    if fields is None and dataclasses.is_dataclass(value):
        is_equinox = any(base.__module__.startswith("equinox.") for base in kind.__mro__)
        if is_equinox or any(map(is_static, dataclasses.fields(value))):
            return None  # static fields are in no leaf
        fields = [field.name for field in dataclasses.fields(value)]
        if not hasattr(value, "__dict__") or vars(value).keys() != set(fields):
            return None
    if fields is None or record_class(type_name(value)) is not kind:
        return None
    entry = Container("object", keys=tuple(fields), type=type_name(value))
    return entry, [(field, encode_forms(getattr(value, field))) for field in fields]


def is_static(field: dataclasses.Field[Any]) -> bool:
    """Whether Equinox or `flax.struct` takes a field as a part of the structure."""
    return bool(field.metadata.get("static")) or field.metadata.get("pytree_node") is False


def record_class(name: str) -> type | None:
    """The class of a named tuple or a dataclass among the modules that are imported, or of an object
    of the program without other bases."""
    if (found := class_named(name)) is None:
        return None
    if issubclass(found, tuple) and hasattr(found, "_fields"):
        return found
    if not is_made_of_attributes(found):
        return None
    is_record = dataclasses.is_dataclass(found)
    bases = [base for base in found.__mro__ if base.__module__ not in _NO_BASES]
    return found if is_record or (bases and all(map(is_user_class, bases))) else None


def build_record(kind: type, values: Mapping[str, Any]) -> Any:
    """A named tuple, a dataclass or an object with these fields. No code of the class runs."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values.values())
    instance = object.__new__(kind)
    set_attributes(instance, values)
    return instance


def build_container(
    container: Container, parts: Sequence[str], element: Callable[[Any, str], Any]
) -> Any:
    """The container that an entry describes, of the escaped `parts` of the paths of its elements.
    `element` gives the value for a key (or a position) and its part."""
    kind = container.kind
    if kind in MAPPINGS:
        keys = container.keys
        if keys is None:
            keys = sorted(unescape(part) for part in parts)
        items = {key: element(key, escape(str(key))) for key in keys}
        if kind == "defaultdict":
            factories: dict[Any, Any] = {name: factory for factory, name in _FACTORIES.items()}
            return defaultdict(factories.get(container.factory), items)
        return items if kind == "dict" else _CONSTRUCTORS[kind](items)
    values = [element(i, str(i)) for i in range(len(parts))]
    if kind == "deque":
        return deque(values, container.maxlen)
    if kind == "torch.Size":
        return sys.modules["torch"].Size(values)
    return _CONSTRUCTORS[kind](values)


def array_class_name(value: Any) -> str:
    """The name that an entry has for the class of an array. It includes the device of a tensor."""
    if isinstance(value, np.generic):
        return "numpy.generic"
    if isinstance(value, np.ndarray):
        return "numpy" if value.dtype.isnative else "numpy.swapped"
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        name = "torch"
        # Python code of PyTorch answers `isinstance(value, Parameter)`: slow for many tensors.
        if type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter):
            name += ".Parameter" if value.requires_grad else ".Parameter.frozen"
        elif value.requires_grad:
            name += ".requires_grad"
        return name if value.device.type == "cpu" else f"{name}@{value.device.type}"
    return "jax"


def _keys(value: Mapping[Any, Any]) -> tuple[Any, ...] | None:
    keys = list(value)
    if all(type(key) is str for key in keys) and all(a < b for a, b in pairwise(keys)):
        return None
    return tuple(keys)
