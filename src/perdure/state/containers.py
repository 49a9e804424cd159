"""The values in an object's state as entries of a manifest, and back without the object."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.leaf_spec import LeafSpec, type_name
from perdure.state.leaf_values import leaf_array, scalar_text
from perdure.state.paths import key_text
from perdure.store.format import escape, unescape
from perdure.store.leaf import Leaf
from perdure.store.manifest import MAPPINGS, OF_TARGET, Container

_SEQUENCES = (list, tuple, deque, set, frozenset)
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
SORTED_DICT = Container("dict")
"""A dict whose keys are strings in code point order. It needs no entry."""


class Form(dict[str, Any]):
    """Replaces a value that a manifest has no entry for, or a mapping whose keys have no text: the
    keys `LISTED` hold its parts and its type. A checkpoint stores it as a dict."""


def describe_container(value: Any) -> tuple[Container, Sequence[tuple[str, Any]]] | None:
    """The manifest entry of a plain container, and its elements by key; None for any other value,
    also of a subclass, whose methods and fields cannot be rebuilt."""
    kind = type(value)
    if kind in PLAIN_MAPPINGS:
        from perdure.state.value_forms import is_named, listed_form

        if not is_named(value):
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
    return entry, [(field, getattr(value, field)) for field in fields]


def is_static(field: dataclasses.Field[Any]) -> bool:
    """Whether Equinox or `flax.struct` takes a field as a part of the structure."""
    return bool(field.metadata.get("static")) or field.metadata.get("pytree_node") is False


def class_named(name: str) -> type[Any] | None:
    """The class of this name among the modules that are imported; None without one."""
    module, _, kind = name.rpartition(".")
    found = getattr(sys.modules.get(module), kind, None)
    return found if isinstance(found, type) else None


def record_class(name: str) -> type | None:
    """The class of a named tuple or a dataclass among the modules that are imported."""
    if (found := class_named(name)) is None:
        return None
    is_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return found if is_tuple or dataclasses.is_dataclass(found) else None


def build_record(kind: type, values: Mapping[str, Any]) -> Any:
    """A named tuple or a dataclass with these fields. No code of the class runs."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values.values())
    instance = object.__new__(kind)
    set_attributes(instance, values)
    return instance


def set_attributes(instance: Any, values: Mapping[str, Any]) -> None:
    """Set attributes, also of a frozen dataclass, which has a `__setattr__` of its own."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the class of `like` with other items."""
    if type(like) is dict:
        return items
    if hasattr(type(like), "default_factory"):
        return type(like)(like.default_factory, items)  # type: ignore[call-arg]
    return type(like)(items)  # type: ignore[call-arg]


def sequence_like(like: Any, parts: list[Any]) -> Any:
    """A list, a tuple or a deque of the class of `like` with these parts; `like` if it has them."""
    if all(map(operator.is_, parts, like)):
        return like
    if isinstance(like, deque):
        return deque(parts, like.maxlen)
    return tuple.__new__(type(like), parts) if isinstance(like, tuple) else type(like)(parts)


def masked_array(data: Any, mask: Any, fill_value: Any, hard_mask: bool) -> Any:
    """A masked array of its parts; without a mask, `mask` is a single `False`."""
    mask = mask if mask.shape or mask else np.ma.nomask
    return np.ma.MaskedArray(data, mask, fill_value=fill_value, hard_mask=hard_mask)


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


def array_template(name: str, leaf: Leaf, like: Any) -> Any:
    """A target for `Adapter.load` of an array of the class `name`, on the device of the tensor
    `like`."""
    base, _, device = name.partition("@")
    if base.startswith("torch"):
        torch = _library("torch")
        if isinstance(like, torch.Tensor) and not like.is_meta:
            target_device = like.device
        else:
            backend = getattr(torch, device, None) if device else None
            available = backend is not None and backend.is_available()
            target_device = device if available else "cpu"
        tensor = torch.empty(0, dtype=getattr(torch, leaf.dtype), device=target_device)
        if base.startswith("torch.Parameter"):
            return torch.nn.Parameter(tensor, requires_grad=not base.endswith(".frozen"))
        return tensor.requires_grad_(base == "torch.requires_grad")
    if base.startswith("jax"):
        _library("jax")
        from perdure.state.jax_state import ADAPTER

        return ADAPTER.abstract(LeafSpec.of(leaf))
    array = leaf_array(leaf)
    if base == "numpy.swapped":
        return array.astype(array.dtype.newbyteorder())
    return array[()] if base == "numpy.generic" else array


def _library(name: str) -> Any:
    if name not in sys.modules:
        raise StateError(
            f"the checkpoint has an array of {name} here. Import {name} before the restore."
        )
    return sys.modules[name]


def _keys(value: Mapping[Any, Any]) -> tuple[Any, ...] | None:
    keys = list(value)
    if all(type(key) is str for key in keys) and all(a < b for a, b in pairwise(keys)):
        return None
    return tuple(keys)
