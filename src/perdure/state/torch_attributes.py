"""The attributes of PyTorch modules and optimizers that are in no `state_dict`: numbers and tensors.

Nothing here may stop a save: a value that raises an error when it is looked at is not compared.
"""

from __future__ import annotations

import enum
import hashlib
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from blake3 import blake3

from perdure.state.paths import join_part
from perdure.state.torch_unsaved import (
    DEPTH,
    MOST,
    STEPPING,
    SavedValues,
    is_of_program,
    is_own_module,
    own_parts,
)
from perdure.state.unsaved_attributes import PLAIN, is_plain, is_same

_OWN = frozenset(vars(torch.nn.Module()))
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "_opt_called", "_step_count")
"""What an optimizer saves, and what a learning rate scheduler sets in it."""
_SCALARS = PLAIN - {tuple}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_COPIED = 4096
"""Elements of a tensor that is copied, so that an equal one that was made again counts as unchanged."""
_READ = 1 << 22
"""Elements of a NumPy array of which a digest is made in each save."""
_MISSING: Any = object()


class _TensorMark(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    version: int
    copy: torch.Tensor | None


class _ArrayMark(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    digest: bytes


class _GeneratorMark(NamedTuple):
    digest: str


class _Part(NamedTuple):
    name: str
    module: weakref.ref[torch.nn.Module]
    marks: dict[str, Any]
    buffers: list[tuple[str, _TensorMark | None]]


class ModuleAttributes:
    """Remembers the attributes of a module and of those inside, without keeping any of them alive.

    `flags_only`: only what is True or False, as of a module that initialises itself by its first batch.
    """

    def __init__(self, module: torch.nn.Module, *, flags_only: bool = False) -> None:
        self._parts: list[_Part] = []
        seen: set[int] = set()
        for name, part in own_parts(module, every=True):
            if not (is_own_module(type(part)) or _is_layer(type(part))):
                continue
            values = _values_of(part, seen)
            if flags_only:
                flags = {key: value for key, value in values.items() if type(value) is bool}
                self._parts.append(_Part(name, weakref.ref(part), flags, []))
                continue
            named = {key: part._buffers.get(key) for key in part._non_persistent_buffers_set}
            found = _marks({key: value for key, value in named.items() if value is not None})
            buffers = [
                (key, found.get(key)) for key in sorted(named) if named[key] is None or key in found
            ]
            if (marks := _marks(values)) or buffers:
                self._parts.append(_Part(name, weakref.ref(part), marks, buffers))

    def changed(self, saved: SavedValues) -> Iterator[str]:
        """The dotted names of the attributes and buffers that have other values now."""
        seen = set(saved.parameters)  # an object among the members is saved
        for name, reference, marks, buffers in self._parts:
            if (module := reference()) is None:
                continue
            for key in _changed(marks, _values_of(module, seen), saved) if marks else ():
                yield _dotted(name, key)
            for key, mark in buffers:
                value = module._buffers.get(key)
                is_lost = False
                with suppress(Exception):
                    is_lost = _has_changed(mark, value) if mark else _is_kept(value)
                if is_lost:
                    yield _dotted(name, key)


class OptimizerAttributes:
    """Remembers the numbers and tensors of an optimizer of the user's, without keeping it alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        inherits = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        self._marks = _marks(self._values()) if inherits else {}

    def changed(self, saved: SavedValues) -> Iterator[str]:
        """The names of the attributes that have other values now."""
        return _changed(self._marks, self._values() if self._marks else {}, saved)

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in getattr(self._optimizer(), "__dict__", {}).items():
            if key not in _OF_OPTIMIZERS and not key.startswith("_optimizer_"):
                with suppress(Exception):
                    _add(values, key, value, set())
        return values


@cache
def _is_layer(kind: type) -> bool:
    """Whether a class is one of the layers of PyTorch, whose numbers are code."""
    return kind.__module__.startswith("torch.nn.modules.")


def _values_of(module: torch.nn.Module, seen: set[int]) -> dict[str, Any]:
    """The attributes of a module by name, and by dotted name what is in containers and objects in them.

    Left out is what a parametrization computes from others.
    """
    values: dict[str, Any] = {}
    is_own = is_own_module(type(module))
    for key, value in vars(module).items():
        if key in _OWN or any(f"{key}_{made}" in module._parameters for made in ("orig", "v")):
            continue
        if is_own:
            with suppress(Exception):
                _add(values, key, value, seen)
        elif not key.startswith("_") and isinstance(value, (torch.Tensor, *_GENERATORS)):
            values[key] = value
    return values


def _add(values: dict[str, Any], key: str, value: Any, seen: set[int]) -> None:
    """Add an attribute and what is in it. Of lists and dicts no numbers, because a log grows there."""
    if type(value) in _SCALARS:
        values[key] = value
        return
    nodes = deque([(key, value, 0, True)])
    for _ in range(MOST):
        if not nodes:
            return
        name, value, depth, counts = nodes.popleft()
        if not counts and (type(value) in PLAIN or isinstance(value, (np.generic, enum.Enum))):
            if type(value) is not tuple:
                continue
        else:
            values[name] = value
        if depth < DEPTH:
            counts = counts and not isinstance(value, (list, dict))
            nodes.extend(
                (f"{name}.{part}", child, depth + 1, counts)
                for part, child in islice(_inside(value, seen), MOST)
            )


def _inside(value: Any, seen: set[int]) -> Iterable[tuple[Any, Any]]:
    kind = type(value)
    if isinstance(value, dict):  # the text of a key that is a tensor would take long
        items = enumerate(value.items())
        return ((key if isinstance(key, (str, int)) else n, part) for n, (key, part) in items)
    if isinstance(value, list):
        return enumerate(value)
    if isinstance(value, tuple):
        if fields := getattr(kind, "_fields", None):
            return zip(fields, value, strict=False)
        return enumerate(value) if kind is tuple and not is_plain(value) else ()
    if not is_of_program(kind) or id(value) in seen:
        return ()
    seen.add(id(value))
    attributes = getattr(value, "__dict__", {})
    # An object that has modules is about the training, such as the one that runs the loop.
    if any(isinstance(part, (torch.nn.Module, *STEPPING)) for part in attributes.values()):
        return ()
    return list(attributes.items())


def _marks(values: Mapping[str, Any]) -> dict[str, Any]:
    marks: dict[str, Any] = {}
    for key, value in values.items():
        with suppress(Exception):
            if (mark := _mark(value)) is not _MISSING:
                marks[key] = mark
    return marks


def _mark(value: Any) -> Any:
    """What shows later whether a value has changed; `_MISSING` if it is not compared."""
    if isinstance(value, torch.Tensor):
        return _tensor_mark(value) if _is_kept(value) else _MISSING
    if isinstance(value, np.ndarray):
        if value.size > _READ or value.dtype.hasobject:
            return _MISSING
        digest = blake3(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).digest()
        return _ArrayMark(value.dtype, value.shape, digest)
    if isinstance(value, _GENERATORS):
        return _GeneratorMark(_generator_digest(value))
    return value if _is_plain(value) else _MISSING


def _generator_digest(value: Any) -> str:
    if isinstance(value, torch.Generator):
        data = value.get_state().numpy().tobytes()
    elif isinstance(value, random.Random):
        data = repr(value.getstate()).encode()
    else:
        is_new = isinstance(value, np.random.Generator)
        state = value.bit_generator.state if is_new else value.get_state(legacy=False)
        with np.printoptions(threshold=sys.maxsize):
            data = repr(state).encode()
    return hashlib.blake2b(data).hexdigest()


def _changed(
    marks: Mapping[str, Any], values: Mapping[str, Any], saved: SavedValues
) -> Iterator[str]:
    """The names of values that are not as they were marked, and that no member of the state saves."""
    for key, mark in marks.items():
        is_lost = False
        with suppress(Exception):
            is_lost = key in values and _is_lost(key, mark, values, saved)
        if is_lost:
            yield key


def _is_lost(key: str, mark: Any, values: Mapping[str, Any], saved: SavedValues) -> bool:
    value = values[key]
    if _has_changed(mark, value):
        return _is_plain(value) or not saved.knows(value)
    if not isinstance(value, (tuple, list, dict)) or not _is_plain(mark) or _is_plain(value):
        return False
    inside = [each for name, each in values.items() if name.startswith(f"{key}.")]
    return any(_is_kept(each) and not saved.knows(each) for each in inside)


def _has_changed(mark: Any, value: Any) -> bool:
    """Whether a value is another one: what is neither plain, an array nor a generator is left alone."""
    if isinstance(mark, _TensorMark):
        return _is_other_tensor(mark, value)
    if value is mark:
        return False
    if isinstance(mark, _GeneratorMark) and not isinstance(value, _GENERATORS):
        return False
    now = _mark(value)
    if now is _MISSING:
        return False
    if isinstance(now, _TensorMark) or type(now) is not type(mark):
        return True
    return now != mark if isinstance(now, (_ArrayMark, _GeneratorMark)) else not is_same(mark, now)


def _dotted(name: str, key: str) -> str:
    return join_part(name.replace(".", "/"), key).replace("/", ".")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (_TensorMark, _ArrayMark, _GeneratorMark)):
        return False
    return (type(value) in PLAIN and is_plain(value)) or isinstance(value, (np.generic, enum.Enum))


def _is_kept(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a dense tensor that is no result of this step: without a graph."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return False  # two of them cannot be compared
    try:
        return value.grad_fn is None
    except RuntimeError:  # a view of a parameter, which an optimizer has changed since
        return False


def _tensor_mark(tensor: torch.Tensor) -> _TensorMark:
    is_small = tensor.numel() <= _COPIED and not tensor.is_meta
    copy = tensor.detach().clone() if is_small else None
    return _TensorMark(weakref.ref(tensor), tensor._version, copy)


def _is_other_tensor(mark: _TensorMark, value: Any) -> bool:
    if not _is_kept(value):
        return False
    if mark.reference() is value and mark.version == value._version:
        return False
    before = mark.copy
    if before is None or before.shape != value.shape or before.dtype != value.dtype:
        return True
    return before.device != value.device or not _has_same_bits(before, value)


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one form are equal; a NaN is equal to itself."""
    if torch.equal(one, other):
        return True
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other)]
    return torch.equal(*(tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in plain))
