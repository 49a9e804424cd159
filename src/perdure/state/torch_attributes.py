"""The attributes of PyTorch modules and optimizers that are in no `state_dict`: numbers and tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from perdure.state.paths import join_part
from perdure.state.unsaved_attributes import PLAIN, is_from_library, is_same

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
    """Remembers the attributes of a module and of those inside, without keeping any of them alive."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts: list[_Part] = []
        for name, part in module.named_modules():
            if is_from_library(type(part)):
                continue
            values = [(key, value) for key, value in vars(part).items() if key not in _OWN]
            found = _Part(
                name,
                weakref.ref(part),
                [(key, _plain_copy(value)) for key, value in values if _is_plain(value)],
                [(key, _mark(value)) for key, value in values if _is_kept(value)],
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
            values = vars(module)
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


def _dotted(name: str, key: str) -> str:
    return join_part(name.replace(".", "/"), key).replace("/", ".")


def _differs(before: Any, value: Any) -> bool:
    """Whether a plain attribute has another value: what is neither plain nor a tensor is left alone."""
    if isinstance(value, np.ndarray) and isinstance(before, np.ndarray):
        return before.dtype != value.dtype or not np.array_equal(before, value)
    if _is_plain(value):
        return not is_same(before, value)
    return _is_kept(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.size <= _COPIED and not value.dtype.hasobject
    return type(value) in PLAIN or isinstance(value, np.generic)


def _plain_copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_kept(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that is no result of this step: without a graph."""
    return isinstance(value, torch.Tensor) and value.grad_fn is None and not value.is_inference()


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
    return before.device != value.device or not torch.equal(before, value)


class OptimizerAttributes:
    """Remembers the plain attributes of an optimizer of the user's, without keeping it alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        inherits = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        self._plain = {
            key: _plain_copy(value)
            for key, value in (vars(optimizer).items() if inherits else ())
            if _is_plain(value) and key not in _OF_SCHEDULERS
        }

    def changed(self) -> Iterator[str]:
        """The names of the attributes that have other values now."""
        values = vars(self._optimizer() or object)
        for key, before in self._plain.items():
            if _differs(before, values.get(key, before)):
                yield key


def unsaved_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of an attribute that is an optimizer with a state which `optimizer` does not save."""
    for name, inner in vars(optimizer).items():
        if not isinstance(inner, torch.optim.Optimizer) or inner.state is optimizer.state:
            continue
        needed = [*_tensors(dict(inner.state))]
        if not needed:
            continue
        saved = [*_tensors(optimizer.state_dict())]
        if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
            is_saved = {id(value) for value in needed} <= {id(value) for value in saved}
        else:  # which may return copies
            is_saved = not Counter(map(_form, needed)) - Counter(map(_form, saved))
        if not is_saved:
            return name
    return None


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors(child)
