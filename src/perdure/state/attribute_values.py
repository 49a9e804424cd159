"""Values in attributes: their kind, whether they have changed, and how a restore sets them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np

from perdure.state import bits
from perdure.state.adapter import Node, loaded_adapters
from perdure.state.containers import is_static
from perdure.state.generators import (
    generator_name,
    is_generator,
    read_generator,
    write_generator,
)
from perdure.state.leaf_spec import type_name
from perdure.state.leaf_values import CONTAINERS, SCALAR_TYPES, memory_axes
from perdure.state.paths import join_key
from perdure.state.program_code import (
    is_code,
    is_made_of_attributes,
    is_process_resource,
    is_user_class,
)
from perdure.state.value_forms import (
    attributes_of,
    class_named,
    encode_forms,
    form_of,
    generator_form,
)
from perdure.state.walk import Walk, node_of

_MOST = 100_000
"""A container with more elements is not compared, which would take milliseconds in each save."""
_COPIED = 4096
"""A tensor of at most this many elements is copied: an equal tensor in its place is no change."""
_WITH_GRAPH = 16 * 1024 * 1024
"""Bytes of a tensor with a graph (an activation, a hidden state) that is stored, without the graph."""


class ValueKind(enum.Enum):
    """What a save does with a value in an attribute."""

    PLAIN = "plain"  # numbers, strings, containers of these
    ARRAY = "array"
    GENERATOR = "generator"
    OBJECT = "object"  # with `state_dict`
    MIXED = "mixed"  # a container, call or object of the program that has more than plain values
    OTHER = "other"


_CALLS = (MethodType, partial)
_CODE = (FunctionType, BuiltinFunctionType, type, np.dtype, *_CALLS)
_CHANGING = (ValueKind.ARRAY, ValueKind.GENERATOR, ValueKind.MIXED)


def kind_of(value: Any) -> ValueKind:
    """What a value is."""
    kind = type(value)
    if _is_plain(value):
        return ValueKind.PLAIN
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return ValueKind.ARRAY if _is_kept(value) else ValueKind.OTHER
    if isinstance(value, np.ndarray):
        return ValueKind.MIXED if value.dtype.hasobject else ValueKind.ARRAY
    if isinstance(value, _CALLS):
        return ValueKind.MIXED if _call_may_change(value) else ValueKind.OTHER
    if is_container_of_program(value):
        return ValueKind.MIXED
    if isinstance(value, CONTAINERS):
        return _kind_of_container(value)
    if is_generator(value):
        return ValueKind.GENERATOR
    if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
        return ValueKind.OBJECT
    if is_user_class(kind) and attributes_of(value):
        return ValueKind.MIXED
    return ValueKind.MIXED if is_value_of_library(value) else ValueKind.OTHER


_MOST_PARTS = 100
"""An object of a library with more parts counts as code or data: settings, a tokenizer, a table."""


def is_value_of_library(value: Any) -> bool:
    """Whether an object of a library consists of a few values (a distribution, a scaler, a sparse
    matrix of SciPy), so that its attributes are its whole state."""
    kind, torch = type(value), sys.modules.get("torch")
    if not is_made_of_attributes(kind) or is_user_class(kind) or not attributes_of(value):
        return False
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen or _is_plain(part) or (seen and is_process_resource(part)):
            continue
        seen.add(id(part))
        if isinstance(part, CONTAINERS):
            pending += part.values() if isinstance(part, dict) else part
        elif isinstance(part, np.ndarray) or (torch is not None and isinstance(part, torch.Tensor)):
            if kind_of(part) is not ValueKind.ARRAY:
                return False
        elif not is_generator(part):
            if not is_made_of_attributes(type(part)) or is_process_resource(part):
                return False
            pending += attributes_of(part).values()
        if len(seen) + len(pending) > _MOST_PARTS:
            return False
    return True


def _call_may_change(call: Any) -> bool:
    """Whether a bound method or a `partial` has values that a run may change, besides a module."""
    arguments = () if isinstance(call, MethodType) else (*call.args, *call.keywords.values())
    parts = (call.__self__ if isinstance(call, MethodType) else call.func, *arguments)
    kinds = ((kind_of(part), isinstance(part, CONTAINERS)) for part in parts)
    return any(kind in _CHANGING or (kind is ValueKind.PLAIN and listed) for kind, listed in kinds)


def is_position(value: Any) -> bool:
    """Whether a value is an iterator of Python whose position has no form: `iter`, `zip`,
    `itertools.cycle`, a generator that has begun."""
    kind = type(value)
    if isinstance(value, GeneratorType):
        return inspect.getgeneratorstate(value) == inspect.GEN_SUSPENDED
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def is_container_of_program(value: Any) -> bool:
    """Whether a value is a container with methods and attributes of its own: no named tuple."""
    is_one = isinstance(value, CONTAINERS) and type(value) not in CONTAINERS
    return is_one and not hasattr(type(value), "_fields") and is_user_class(type(value))


def _is_plain(value: Any) -> bool:
    is_number = type(value) in SCALAR_TYPES or isinstance(value, (np.generic, enum.Enum))
    return is_number or form_of(value) is not None


def parts_inside(value: Any) -> Iterator[Any]:
    """A value and, if it is a container, the values in it at any depth; cycles are possible."""
    pending = [value]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, CONTAINERS):
            pending += part.values() if isinstance(part, dict) else part


def _kind_of_container(value: Any) -> ValueKind:
    for number, part in enumerate(parts_inside(value)):
        if number == _MOST:
            return ValueKind.OTHER
        if is_container_of_program(part) or not (isinstance(part, CONTAINERS) or _is_plain(part)):
            return ValueKind.MIXED
    return ValueKind.PLAIN


def items_of(value: Any, name_of: Callable[[Any], str | None]) -> Iterable[tuple[str | int, Any]]:
    """The parts of a container or an object by storable keys; `name_of` names the other keys."""
    if isinstance(value, dict):
        named = (
            (key if type(key) in (str, int) else name_of(key), part) for key, part in value.items()
        )
        return [(key, part) for key, part in named if key is not None]
    if isinstance(value, tuple) and (fields := getattr(type(value), "_fields", None)):
        return list(zip(fields, value, strict=False))
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    return list(attributes_of(value).items())


def has_others(value: Any) -> bool:
    """Whether a value of a kind that is not stored is in a container, at any depth."""
    return any(
        not isinstance(part, (*SCALAR_TYPES, *CONTAINERS)) and kind_of(part) is ValueKind.OTHER
        for part in islice(parts_inside(value), _MOST)
    )


def mark_of(value: Any, *, is_fresh: bool = True) -> Any:
    """A mark of a value: `fresh == later` if the value has not changed. A mark keeps no large array
    alive; with `is_fresh` it has copies, because it will be compared later."""
    kind = type(value)
    if kind in (bool, int, str, type(None)):  # nearly every value
        return kind, value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and form_of(value) is None:
        return _TensorMark(value, is_fresh)
    if kind_of(value) in (ValueKind.PLAIN, ValueKind.ARRAY):
        return kind, bits.hash_of(value)
    if isinstance(value, dict):
        parts = value.items()
        return kind, [(repr(key), mark_of(part, is_fresh=is_fresh)) for key, part in parts]
    if isinstance(value, (list, tuple, deque)):
        return kind, [mark_of(part, is_fresh=is_fresh) for part in value]
    form = stored_form(value)
    return kind, id(value) if form is value else mark_of(form, is_fresh=is_fresh)


class _TensorMark:
    """A tensor by its identity and version, and by its bits, because a change through `tensor.data`
    leaves the version. A large tensor with another identity or version counts as changed."""

    def __init__(self, tensor: Any, is_fresh: bool) -> None:
        self._reference = weakref.ref(tensor)
        self._version = tensor._version
        self._bits = self._hash = None
        if hasattr(tensor, "device_mesh") or tensor.is_meta:
            return
        if tensor.numel() <= _COPIED:
            self._bits = tensor.detach().clone() if is_fresh else tensor
        elif is_fresh:
            self._hash = bits.hash_of(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorMark):
            return False
        tensor = self._reference()
        is_one = tensor is not None and tensor is other._reference()
        if self._bits is not None and other._bits is not None:
            return bits.same(self._bits, other._bits)
        if not is_one or self._version != other._version:
            return False
        return self._hash is None or self._hash == bits.hash_of(tensor)

    __hash__ = None  # type: ignore[assignment]


def stored_form(value: Any) -> Any:
    """The plain containers and arrays that stand for a value in a checkpoint."""
    if isinstance(value, enum.Enum) and class_named(type_name(value)) is not type(value):
        return value.name
    if is_generator(value):
        return generator_form(value)
    if kind_of(value) is ValueKind.OBJECT:
        node: Any = node_of(value, "", loaded_adapters(), None)
        state = node.read()
        return dict(state) if isinstance(state, Mapping) else state
    return encode_forms(value)


def put_value(present: Any, stored: Any, shared: AbstractSet[int] = frozenset()) -> Any:
    """The stored value, if possible put into the object `present`, to which others may refer. An object
    whose `id` is in `shared` is not changed."""
    if present is stored or id(stored) in shared or id(present) in shared:
        return stored
    if kind_of(stored) is ValueKind.OBJECT or isinstance(stored, MethodType):
        return stored  # what the state has
    if is_generator(stored):
        if not is_generator(present) or generator_name(present) != generator_name(stored):
            return stored
        write_generator(present, read_generator(stored))
        return present
    if present is not None and kind_of(present) is ValueKind.OBJECT:
        node: Any = node_of(present, "", loaded_adapters(), None)
        node.load(stored)
        return present
    if isinstance(present, enum.Enum) and isinstance(stored, str):
        return type(present)[stored]
    if not isinstance(stored, dict) and hasattr(stored, "dtype"):
        return _put_array(present, stored)
    if type(present) is not type(stored):
        return stored
    is_object = kind_of(stored) is ValueKind.MIXED and not isinstance(stored, CONTAINERS)
    if is_object or is_container_of_program(stored):
        for name, part in attributes_of(stored).items():
            part = put_value(getattr(present, name, None), part, shared)
            object.__setattr__(present, name, part)
    return present if is_object else _put_container(present, stored, shared)


def _put_array(present: Any, stored: Any) -> Any:
    is_alike = type(present) is type(stored) and present.shape == stored.shape
    if not is_alike or present.dtype != stored.dtype:
        return stored
    if isinstance(present, np.ma.MaskedArray):  # no copy has its mask
        return stored
    if isinstance(present, np.ndarray):
        orders = [memory_axes(each.shape, each.strides) for each in (present, stored)]
        if not present.flags.writeable or orders[0] != orders[1]:
            return stored
        np.copyto(present, stored)
        return present
    if getattr(present, "is_leaf", False) and present.device == stored.device:
        from perdure.state.torch_tensors import copy_into

        copy_into(present, stored)
        return present
    return stored


def _put_container(present: Any, stored: Any, shared: AbstractSet[int]) -> Any:
    if isinstance(stored, dict):
        values = {key: put_value(present.get(key), part, shared) for key, part in stored.items()}
        present.clear()
        present.update(values)
        return present
    if isinstance(stored, list):
        old = [*present, *[None] * len(stored)]
        pairs = zip(old, stored, strict=False)
        present[:] = [put_value(one, other, shared) for one, other in pairs]
        return present
    if isinstance(stored, deque) and present.maxlen == stored.maxlen:
        present.clear()
        present.extend(stored)
        return present
    return stored


def _is_kept(value: Any) -> bool:
    """Whether a value is a dense tensor, and no large result of this step (with a graph)."""
    torch = sys.modules["torch"]
    is_sparse = value.layout != torch.strided or value.is_nested
    if is_sparse or value.is_inference() or value.is_quantized or value.is_meta:
        return False
    try:
        return value.grad_fn is None or value.nbytes <= _WITH_GRAPH
    except RuntimeError:  # a view of a parameter, which an optimizer has changed since
        return False


_MODES = ("training", "deterministic", "use_running_average")
"""Attributes of NNX that a program sets for an evaluation, and sets back."""


def static_owners(walk: Walk) -> Iterator[tuple[str, Any, list[str]]]:
    """Path and value of each module with plain values that JAX takes as part of its structure, and
    their names: static fields of dataclasses (Equinox, `flax.struct`), attributes of NNX modules;
    and the attributes of Keras objects."""
    if (keras_state := sys.modules.get("perdure.state.keras_state")) is not None:
        for branch in walk.branches:
            yield from keras_state.static_attributes(branch.value, branch.path)
    if "jax" not in sys.modules:
        return
    for branch in walk.branches:
        kind = type(branch.value)
        if _may_have_fields(kind):
            yield from _static_inside(branch.path, branch.value)
        elif _is_registered(kind) and isinstance(branch.node, Node) and not branch.node.in_place:
            # The attributes that a class which is registered with JAX leaves out of its children.
            children = {key for key, _ in branch.node.children}
            values = getattr(branch.value, "__dict__", {})
            names = [name for name in values if name not in children]
            if static := [name for name in names if _is_plain_or_code(values[name])]:
                yield branch.path, branch.value, static


def _static_inside(path: str, value: Any) -> Iterator[tuple[str, Any, list[str]]]:
    if isinstance(value, Mapping):
        children = value.items()
    elif _may_have_fields(type(value)):  # also the lists of NNX
        static, parts = _fields_of(value)
        if static:
            yield path, value, static
        children = parts.items()
    elif isinstance(value, Sequence):
        children = enumerate(value)
    else:
        return
    for name, part in children:
        is_container = isinstance(part, (Mapping, Sequence)) and not isinstance(part, (str, bytes))
        if is_container or _may_have_fields(type(part)):
            yield from _static_inside(join_key(path, str(name)), part)


def _fields_of(value: Any) -> tuple[list[str], dict[str, Any]]:
    """The names of the static values of a dataclass or a module of NNX, and its other values."""
    if dataclasses.is_dataclass(value) and not _is_module_of_nnx(type(value)):
        fields = dataclasses.fields(value)
        static = [field.name for field in fields if is_static(field)]
        parts = {field.name: getattr(value, field.name, None) for field in fields}
    else:
        attributes = vars(value).items()
        parts = {n: part for n, part in attributes if not n.startswith(("_pytree", "_object"))}
        static = [n for n, part in parts.items() if n not in _MODES and _is_plain_or_code(part)]
    return static, {name: part for name, part in parts.items() if name not in static}


@cache
def _is_registered(kind: type) -> bool:
    """Whether values of a class of the program may be nodes of JAX with attributes of their own."""
    is_plain = issubclass(kind, (tuple, list, dict)) or not hasattr(kind, "__dict__")
    return is_user_class(kind) and not is_plain


@cache
def _may_have_fields(kind: type) -> bool:
    """Whether a class is a module of NNX, or a dataclass with static fields or of Equinox."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if dataclasses.is_dataclass(kind) and not _is_module_of_nnx(kind):
        return "equinox" in names or any(map(is_static, dataclasses.fields(kind)))
    return _is_module_of_nnx(kind)


def _is_module_of_nnx(kind: type) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(kind, nnx.Module)


def _is_plain_or_code(value: Any) -> bool:
    return kind_of(value) is ValueKind.PLAIN or isinstance(value, _CODE) or is_code(value)


def untracked(value: Any) -> Any:
    """A plain list, dict or set in place of Keras's wrapper class, which Keras makes again."""
    kinds = type(value).__mro__
    is_one = isinstance(value, CONTAINERS) and kinds[0].__module__.startswith("keras.")
    return kinds[1](value) if is_one else value


class StaticMark:
    """The mark of a static value that is no plain value: compared as JAX compares it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticMark):
            return False
        one, value = self._value, other._value
        try:
            return one is value or (type(one) is type(value) and bool(one == value))
        except ValueError:  # of arrays
            return np.array_equal(one, value)

    __hash__ = None  # type: ignore[assignment]


def static_mark(value: Any) -> Any:
    """As `mark_of`, for a value that JAX takes as part of the structure."""
    return mark_of(value) if kind_of(value) is ValueKind.PLAIN else StaticMark(value)
