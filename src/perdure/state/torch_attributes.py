"""The attributes of PyTorch modules and optimizers that are in no `state_dict`: numbers and tensors."""

from __future__ import annotations

import enum
import hashlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from perdure.state.paths import join_part
from perdure.state.unsaved_attributes import PLAIN, is_from_library, is_plain, is_same

_OWN = frozenset(vars(torch.nn.Module()))
_COPIED = 4096
"""Elements of a tensor that is copied, so that an equal one that was made again counts as unchanged."""
_MISSING: Any = object()
_OF_SCHEDULERS = ("_opt_called", "_step_count")
"""What a learning rate scheduler sets in its optimizer."""


class _TensorMark(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    version: int
    copy: torch.Tensor | None


class _Part(NamedTuple):
    name: str
    module: weakref.ref[torch.nn.Module]
    plain: list[tuple[str, Any]]
    tensors: list[tuple[str, _TensorMark]]
    buffers: list[tuple[str, _TensorMark | None]]


class ModuleAttributes:
    """Remembers the attributes of a module and of those inside, without keeping any of them alive.

    `flags_only`: only what is True or False, as of a module that initialises itself by its first batch.
    """

    def __init__(self, module: torch.nn.Module, *, flags_only: bool = False) -> None:
        self._parts: list[_Part] = []
        for name, part in module.named_modules():
            if is_from_library(type(part)):
                continue
            values = _values_of(part)
            if flags_only:
                flags = [(key, value) for key, value in values.items() if type(value) is bool]
                self._parts.append(_Part(name, weakref.ref(part), flags, [], []))
                continue
            found = _Part(
                name,
                weakref.ref(part),
                [(key, _plain_copy(value)) for key, value in values.items() if _is_plain(value)],
                [(key, _mark(value)) for key, value in values.items() if _is_kept(value)],
                [
                    (key, _mark(value) if _is_kept(value) else None)
                    for key in sorted(part._non_persistent_buffers_set)
                    if (value := part._buffers.get(key, _MISSING)) is None or _is_kept(value)
                ],
            )
            if found.plain or found.tensors or found.buffers:
                self._parts.append(found)

    def changed(self) -> Iterator[str]:
        """The dotted names of the attributes and buffers that have other values now."""
        for name, reference, plain, tensors, buffers in self._parts:
            if (module := reference()) is None:
                continue
            values = _values_of(module)
            for key, before in plain:
                if (value := values.get(key, before)) is not before and _differs(before, value):
                    yield _dotted(name, key)
            for key, mark in tensors:
                if _has_changed(mark, values.get(key)):
                    yield _dotted(name, key)
            for key, mark in buffers:
                value = module._buffers.get(key)
                if _has_changed(mark, value) if mark else _is_kept(value):
                    yield _dotted(name, key)


def _values_of(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that is not PyTorch's, and those of tuples and namespaces in them.

    Of a generator, a digest of its state. Left out is what a parametrization computes from others.
    """
    values: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key in _OWN or any(f"{key}_{made}" in module._parameters for made in ("orig", "v")):
            continue
        values[key] = _generator_state(value)
        if type(value) is tuple and not is_plain(value):
            values |= {f"{key}.{number}": part for number, part in enumerate(value)}
        elif type(value) is SimpleNamespace:
            values |= {f"{key}.{name}": part for name, part in vars(value).items()}
    return values


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return hashlib.blake2b(value.get_state().numpy().tobytes()).hexdigest()
    if isinstance(value, np.random.Generator):
        return hashlib.blake2b(repr(value.bit_generator.state).encode()).hexdigest()
    return value


def _dotted(name: str, key: str) -> str:
    return join_part(name.replace(".", "/"), key).replace("/", ".")


def _differs(before: Any, value: Any) -> bool:
    """Whether a plain attribute has another value: what is neither plain nor a tensor is left alone."""
    if isinstance(value, np.ndarray) and isinstance(before, np.ndarray):
        described = before.dtype, before.shape
        return described != (value.dtype, value.shape) or before.tobytes() != value.tobytes()
    if _is_plain(value):
        return not is_same(before, value)
    return any(map(_is_kept, value)) if type(value) is tuple else _is_kept(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.size <= _COPIED and not value.dtype.hasobject
    return (type(value) in PLAIN and is_plain(value)) or isinstance(value, (np.generic, enum.Enum))


def _plain_copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_kept(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that is no result of this step: without a graph."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    try:
        return value.grad_fn is None
    except RuntimeError:  # a view of a parameter, which an optimizer has changed since
        return False


def _mark(tensor: torch.Tensor) -> _TensorMark:
    is_small = tensor.numel() <= _COPIED and not tensor.is_meta
    copy = tensor.detach().clone() if is_small else None
    return _TensorMark(weakref.ref(tensor), tensor._version, copy)


def _has_changed(mark: _TensorMark, value: Any) -> bool:
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
    bits = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


class OptimizerAttributes:
    """Remembers the numbers and tensors of an optimizer of the user's, without keeping it alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        inherits = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        values = vars(optimizer) if inherits else {}
        self._plain = {
            key: _plain_copy(value)
            for key, value in values.items()
            if _is_plain(value) and key not in _OF_SCHEDULERS
        }
        self._tensors = {key: _mark(value) for key, value in values.items() if _is_kept(value)}

    def changed(self) -> Iterator[str]:
        """The names of the attributes that have other values now."""
        values = vars(self._optimizer() or object)
        for key, before in self._plain.items():
            if _differs(before, values.get(key, before)):
                yield key
        for key, mark in self._tensors.items():
            if _has_changed(mark, values.get(key)):
                yield key
