"""Values that have no entry in a manifest, as plain containers from which they are made again.

`{"!listed": parts, "in": name}` stands for a value of the form `name`: a row of `_FORMS`, an
enumeration or another class of the program, or a dict whose keys have no text. No code of the program
runs when a value is made again, and only classes of modules that are imported are found.
"""

from __future__ import annotations

import ast
import datetime as dt
import enum
import itertools
import operator
import pathlib
import re
import sys
import uuid
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MethodType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.generators import (
    generator_name,
    is_generator,
    new_generator,
    read_generator,
    seed_from,
    seed_text,
    write_generator,
)
from perdure.state.leaf_spec import type_name
from perdure.state.leaf_values import CONTAINERS, SCALAR_TYPES
from perdure.state.paths import LISTED
from perdure.state.program_code import is_program_module, is_user_class

_LISTED = LISTED[0]
_MEMBER = "!member"
_OBJECT = "!object"
_GENERATOR = "generator"
_BASES: dict[str, Any] = {
    each.__name__: each for each in (object, list, dict, deque, set, SimpleNamespace)
}
_CALLABLES = (type, FunctionType, BuiltinFunctionType)
_LIBRARIES = ("torch", "jax", "numpy")
"""Packages whose functions and classes are stored by name; those of the program are, too."""
_ODD = (np.str_, np.bytes_, np.datetime64, np.timedelta64, np.void)
"""Elements of arrays that no leaf can have."""


class Form(dict[str, Any]):
    """Replaces a value that a manifest has no entry for, or a mapping whose keys have no text: the
    keys `LISTED` hold its parts and its type. A checkpoint stores it as a dict."""


class _Form(NamedTuple):
    """A form of values: `kind`, if all values of that class have this form; the function from a value
    to plain `parts` that fix it exactly; and the function from parts to the value `made`."""

    kind: type | None
    parts: Callable[[Any], Any]
    made: Callable[[Any], Any]


def _array_parts(value: Any) -> list[Any]:
    descr = repr(np.lib.format.dtype_to_descr(value.dtype))
    octets = np.frombuffer(value.tobytes(), np.uint8)
    kind = "record" if isinstance(value, np.recarray) else "array"
    kind = "scalar" if isinstance(value, np.generic) else kind
    return [kind, descr, list(value.shape), octets]


def _array_made(parts: Any) -> Any:
    kind, descr, shape, octets = parts
    dtype = np.lib.format.descr_to_dtype(ast.literal_eval(descr))
    made = np.ndarray(tuple(shape), dtype, octets.tobytes() or None).copy()
    return made[()] if kind == "scalar" else made.view(np.recarray) if kind == "record" else made


def _objects_made(parts: Any) -> Any:
    shape, values = parts
    made = np.empty(len(values), object)
    for index, part in enumerate(values):  # NumPy would take lists of one length for a dimension
        made[index] = part
    return made.reshape(tuple(shape))


def _sparse_parts(value: Any) -> list[Any]:
    plain = value.detach()
    return [list(value.shape), value.is_coalesced(), plain._indices(), plain._values()]


def _sparse_made(parts: Any) -> Any:
    shape, is_coalesced, indices, values = parts
    make = sys.modules["torch"].sparse_coo_tensor
    return make(indices, values, tuple(shape), is_coalesced=is_coalesced, check_invariants=False)


def _generator_made(parts: Any) -> Any:
    kind, state = parts
    generator = new_generator(kind)
    write_generator(generator, state)
    return generator


def _count_parts(value: Any) -> Any:
    try:
        return list(ast.literal_eval(f"[{repr(value)[len('count(') : -1]}]"))
    except ValueError:  # of numbers of a class of the program
        raise UnsupportedLeafError(f"{value!r} has no exact form in a checkpoint.") from None


def _torch_dtype(name: str) -> Any:
    torch = sys.modules["torch"]
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise UnsupportedLeafError(f"PyTorch has no dtype {name!r}, which the checkpoint names")
    return found


def _public_name(value: Any) -> str | None:
    """The name by which a function or a class is found again; None without one."""
    module, name = str(getattr(value, "__module__", None)), value.__qualname__
    names = [(module, name)]
    if type(value) is BuiltinFunctionType:  # of the compiled part of PyTorch
        names += [("torch", value.__name__), ("torch.nn.functional", value.__name__)]
    for module, name in names:
        text = f"{module}:{name}"
        is_kept = module.partition(".")[0] in _LIBRARIES or is_program_module(module)
        if is_kept and _named(text) is value:
            return text
    return None


def _found_by_name(text: str) -> Any:
    found = _named(text)
    if not isinstance(found, _CALLABLES) or _public_name(found) != text:
        raise UnsupportedLeafError(f"the program has no {text}, which the checkpoint names")
    return found


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


_FORMS: dict[str, _Form] = {
    "fraction": _Form(Fraction, str, Fraction),
    "decimal": _Form(Decimal, str, Decimal),
    "count": _Form(itertools.count, _count_parts, lambda parts: itertools.count(*parts)),
    "range": _Form(range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "slice": _Form(slice, lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    "ellipsis": _Form(EllipsisType, str, lambda _: ...),
    "bytearray": _Form(bytearray, bytes, bytearray),
    "path": _Form(type(pathlib.Path()), str, pathlib.Path),
    "uuid": _Form(uuid.UUID, str, uuid.UUID),
    "datetime": _Form(dt.datetime, dt.datetime.isoformat, dt.datetime.fromisoformat),
    "date": _Form(dt.date, dt.date.isoformat, dt.date.fromisoformat),
    "time": _Form(dt.time, dt.time.isoformat, dt.time.fromisoformat),
    "timedelta": _Form(
        dt.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: dt.timedelta(*parts),
    ),
    "pattern": _Form(re.Pattern, lambda p: [p.pattern, p.flags], lambda parts: re.compile(*parts)),
    "array.array": _Form(array, lambda a: [a.typecode, a.tobytes()], lambda parts: array(*parts)),
    "mappingproxy": _Form(MappingProxyType, dict, MappingProxyType),
    "dtype": _Form(
        None,
        lambda dtype: repr(np.lib.format.dtype_to_descr(dtype)),
        lambda text: np.lib.format.descr_to_dtype(ast.literal_eval(text)),
    ),
    "array": _Form(np.recarray, _array_parts, _array_made),
    "objects": _Form(None, lambda a: [list(a.shape), [*a.flat]], _objects_made),
    "seed sequence": _Form(np.random.SeedSequence, seed_text, seed_from),
    "masked": _Form(
        np.ma.MaskedArray,
        lambda a: [np.asarray(a.data), np.asarray(a.mask), np.asarray(a.fill_value), a.hardmask],
        lambda parts: masked_array(*parts),
    ),
    "torch.device": _Form(None, str, lambda name: sys.modules["torch"].device(name)),
    "torch.dtype": _Form(None, lambda dtype: str(dtype).rpartition(".")[2], _torch_dtype),
    "sparse": _Form(None, _sparse_parts, _sparse_made),
    _GENERATOR: _Form(
        None, lambda each: [generator_name(each), read_generator(each)], _generator_made
    ),
    "method": _Form(
        None,
        lambda method: [method.__self__, method.__func__.__name__],
        lambda parts: getattr(parts[0], parts[1]),
    ),
    "partial": _Form(
        None,
        lambda call: [call.func, [*call.args], call.keywords],
        lambda parts: partial(parts[0], *parts[1], **parts[2]),
    ),
    "name": _Form(None, _public_name, _found_by_name),
}
_BY_TYPE = {form.kind: name for name, form in _FORMS.items() if form.kind is not None}


def form_of(value: Any) -> str | None:
    """The name of the form of a value that is no scalar, array or container; None without one."""
    kind = type(value)
    if (name := _BY_TYPE.get(kind)) is not None:
        is_kept = not isinstance(value, (dt.datetime, dt.time)) or not value.tzinfo
        is_kept = is_kept or isinstance(value.tzinfo, dt.timezone)
        has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        return name if is_kept and not has_objects else None
    if isinstance(value, (np.ndarray, np.generic)):
        is_odd = kind is np.ndarray or isinstance(value, np.generic)
        is_odd = is_odd and value.dtype.type in _ODD and not value.dtype.hasobject
        return "array" if is_odd else None
    if isinstance(value, np.dtype):
        return "dtype" if value.isbuiltin == 1 or value.type in _ODD else None
    if isinstance(value, _CALLABLES):
        return "name" if _public_name(value) else None
    if kind is partial:
        settings = (*value.args, *value.keywords.values())
        has_scalars = all(type(part) in SCALAR_TYPES for part in settings)
        return "partial" if has_scalars and form_of(value.func) == "name" else None
    if kind.__module__ == "torch":
        if kind.__name__ in ("device", "dtype"):
            return f"torch.{kind.__name__}"
        torch = sys.modules["torch"]
        is_sparse = kind is torch.Tensor and value.layout is torch.sparse_coo
        return "sparse" if is_sparse and value.grad_fn is None else None
    return None


def encode_forms(value: Any) -> Any:
    """A value in which forms replace all values that have no entry in a manifest."""
    if type(value) in SCALAR_TYPES or type(value) is Form:
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.grad_fn is not None:
        refuse_pending(value)
        return value.detach()  # the graph is of this process
    if isinstance(value, enum.Enum) and class_named(type_name(value)) is type(value):
        name = value.value if isinstance(value, enum.Flag) else value.name
        return Form({_LISTED: name, "in": type_name(value)})
    if (name := form_of(value)) is not None:
        return Form({_LISTED: encode_forms(_FORMS[name].parts(value)), "in": name})
    if type(value) is np.ndarray and value.dtype.hasobject and not value.dtype.names:
        return Form({_LISTED: encode_forms(_FORMS["objects"].parts(value)), "in": "objects"})
    if not isinstance(value, CONTAINERS) or not value:
        return value
    if isinstance(value, (set, frozenset)):
        if all(type(part) in SCALAR_TYPES for part in value):
            return value
        parts = [encode_forms(part) for part in sorted(value, key=repr)]
        return Form({_LISTED: parts, "in": type(value)()})
    if not isinstance(value, dict):
        return sequence_like(value, [encode_forms(part) for part in value])
    return _with_named_keys(value, list(map(encode_forms, value.values())))


def refuse_pending(tensor: Any) -> None:
    """Refuse a tensor whose graph a backward pass can still use: no checkpoint has a graph, so that a
    resumed program would lack its gradients. A used graph is freed, and not missed."""
    if tensor.grad_fn is None:
        return
    pending, seen = [tensor.grad_fn], set[Any]()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [above for above, _ in node.next_functions]
        for name in dir(type(node)):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError:  # a backward pass has freed it
                    return
    raise UnsupportedLeafError(
        "a tensor with a graph, and no backward pass has gone through it yet. A checkpoint has no "
        "graphs, so that a resumed program would lack these gradients. Save after the backward pass, "
        "or keep `tensor.detach()` if none follows."
    )


_MOST_NODES = 10_000
"""How many nodes of a graph are visited."""


def generator_form(generator: Any) -> Any:
    """The kind and the state of a random generator."""
    return Form({_LISTED: _FORMS[_GENERATOR].parts(generator), "in": _GENERATOR})


def whole_form(value: Any, name_of: Callable[[Any], str | None]) -> Any:
    """As `encode_forms`, also for objects of the program, at any depth. Members of the state, which
    `name_of` names, become references. `UnsupportedLeafError` if an object cannot be made again."""
    if type(value) in SCALAR_TYPES:
        return value
    if (name := name_of(value)) is not None:
        return _member(name)
    if is_generator(value):
        return generator_form(value)
    kind = type(value)
    if kind is MethodType and name_of(value.__self__) is not None:
        return Form({_LISTED: whole_form(_FORMS["method"].parts(value), name_of), "in": "method"})
    if kind is np.ndarray and value.dtype.hasobject:
        return Form({_LISTED: whole_form(_FORMS["objects"].parts(value), name_of), "in": "objects"})
    if kind in CONTAINERS or hasattr(kind, "_fields"):
        if kind is dict or kind is defaultdict:
            parts = [whole_form(part, name_of) for part in value.values()]
            return _with_named_keys(value, parts, name_of)
        if isinstance(value, (tuple, list, deque)):
            return sequence_like(value, [whole_form(part, name_of) for part in value])
    if not is_user_class(kind) or hasattr(kind, "state_dict"):
        return encode_forms(value)
    base = next(base for base in kind.__mro__ if base in _BASES.values())
    if class_named(type_name(value)) is not kind or _new(kind, base) is None:
        raise UnsupportedLeafError(
            f"a {type_name(value)} cannot be made again from its attributes. Give it "
            f"`state_dict` and `load_state_dict`, and give the restore a target that has one."
        )
    attributes = {key: whole_form(part, name_of) for key, part in attributes_of(value).items()}
    items: Any = [*value.items()] if base is dict else [*value] if base is list else []
    if base is deque or base is set:
        items = deque(value, value.maxlen) if base is deque else set(value)
    parts = [_with_named_keys(attributes, [*attributes.values()]), whole_form(items, name_of)]
    return Form({_LISTED: parts, "in": type_name(value), _OBJECT: base.__name__})


def is_form(stored: Mapping[Any, Any]) -> bool:
    """Whether a dict from a checkpoint is a form. (A dict of the program with these keys is listed.)"""
    return stored.keys() - {_OBJECT} == {*LISTED}


def made_value(stored: dict[str, Any], member: Callable[[str], Any] = lambda name: name) -> Any:
    """The value of a form whose parts are made; `stored` itself if it is none."""
    if not is_form(stored):
        return stored
    parts, name = stored[_LISTED], stored["in"]
    if name == _MEMBER:
        return member(parts)
    if isinstance(name, dict):
        return mapping_like(name, dict(map(tuple, parts)))
    if not isinstance(name, str):
        return type(name)(parts)
    if name in _FORMS:
        return _FORMS[name].made(parts)
    kind: Any = class_named(name)
    is_object = _OBJECT in stored
    # A checkpoint may name any class: no other one is made.
    if kind is None or not (is_user_class(kind) if is_object else issubclass(kind, enum.Enum)):
        raise UnsupportedLeafError(
            f"the program has no {name}, of which the checkpoint has a value"
        )
    if not is_object:
        return kind[parts] if isinstance(parts, str) else kind(parts)
    attributes, items = parts
    base = _BASES[stored[_OBJECT]]
    instance = _new(kind, base)
    set_attributes(instance, attributes)
    if base is deque:
        deque.__init__(instance, items, items.maxlen)
    elif base in (list, dict, set):
        base.__init__(instance, items)
    return instance


def _new(kind: type, base: Any) -> Any:
    try:
        return base.__new__(kind)
    except TypeError:  # of a class that another base lays out, such as an exception
        return None


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, also in `__slots__`; of a bound method or a `partial` its parts."""
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if type(value) is partial:
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    state: Any = object.__getstate__(value)  # type: ignore[attr-defined]
    parts = state if isinstance(state, tuple) else (state,)  # `__dict__`, then the slots
    return {name: part for each in parts for name, part in (each or {}).items()}


def _with_named_keys(
    value: dict[Any, Any],
    parts: list[Any],
    name_of: Callable[[Any], str | None] = lambda _: None,
) -> Any:
    """A dict with other values, or its form."""
    if not is_named(value):
        return listed_form(value, parts, name_of)
    is_same = all(map(operator.is_, parts, value.values()))
    return value if is_same else mapping_like(value, dict(zip(value, parts, strict=True)))


def is_named(value: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping have distinct texts, and are not the keys of a form."""
    kinds = set(map(type, value))
    if not kinds <= {str, int} or "" in value or (len(value) in (2, 3) and is_form(value)):
        return False
    return len(kinds) < 2 or len(set(map(str, value))) == len(value)


def listed_form(
    value: Mapping[Any, Any],
    parts: Iterable[Any] | None = None,
    name_of: Callable[[Any], str | None] = lambda _: None,
) -> Form:
    """A mapping as a list of pairs: the forms of its keys, and its values or `parts` for them."""
    torch = sys.modules.get("torch")
    if torch is not None and any(
        isinstance(key, torch.Tensor) and name_of(key) is None for key in value
    ):
        raise UnsupportedLeafError(
            "a dict whose keys are tensors, which only the object itself finds again: a restored key "
            "would be another one. Use names as keys, such as those of `named_parameters`."
        )
    keys = [encode_forms(key) if (name := name_of(key)) is None else _member(name) for key in value]
    listed = list(zip(keys, value.values() if parts is None else parts, strict=True))
    return Form({_LISTED: listed, "in": mapping_like(value, {})})


def _member(name: str) -> Form:
    """The form of a member of the state by its name."""
    return Form({_LISTED: name, "in": _MEMBER})


def class_named(name: str) -> type[Any] | None:
    """The class of this name among the modules that are imported; None without one."""
    module, _, kind = name.rpartition(".")
    found = getattr(sys.modules.get(module), kind, None)
    return found if isinstance(found, type) else None


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
