"""Optimizers that others own and no checkpoint has, and tensors that they step outside of the state."""

from __future__ import annotations

import enum
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch

from perdure.state.live_objects import live_objects, members
from perdure.state.unsaved_attributes import is_from_library

_SAVING = ("state_dict", "get_extra_state", "_save_to_state_dict")
STEPPING = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_OWN = frozenset([*vars(torch.nn.Module()), "param_groups"])
_CLOSED = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)
DEPTH, MOST = 3, 256
"""How deep, and at how many elements, containers are looked at: a log grows."""


class SavedValues:
    """The values that a state has, by identity and by memory. Each is found when it is asked for."""

    def __init__(self, state: Any) -> None:
        self._state = state

    @cached_property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers among the members by path."""
        return {
            path: value
            for path, value in live_objects(self._state)
            if isinstance(value, torch.optim.Optimizer)
        }

    @cached_property
    def parameters(self) -> set[int]:
        """The `id` of each member, and of each parameter of a module among them."""
        found, seen = list(self._members), set()
        modules: list[Any] = [value for value in found if isinstance(value, torch.nn.Module)]
        while modules:
            module = modules.pop()
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                if parameters := module._parameters:
                    found += parameters.values()
                if parts := module._modules:
                    modules += parts.values()
        return set(map(id, found))

    def has(self, value: Any) -> bool:
        """Whether a value is a member, or a tensor in the memory of one or of what one saves."""
        if id(value) in self.parameters:
            return True
        if not isinstance(value, torch.Tensor):
            return False
        return _memory(value) in self._memory or _form(value) in self._copied

    def knows(self, value: Any) -> bool:
        """Whether the state has a value, or an optimizer of the state steps it."""
        if self.has(value):
            return True
        return isinstance(value, torch.Tensor) and _memory(value) in self._stepped

    def has_state_of(self, value: Any) -> bool:
        """Whether an optimizer or the like is a member, or a member has what it saves."""
        if id(value) in self.parameters:
            return True
        states = [getattr(optimizer, "state", None) for optimizer in self.optimizers.values()]
        if any(getattr(value, "state", ...) is state for state in states):
            return True
        keys = value.state_dict().keys()
        return any(keys <= mapping.keys() for mapping in self._mappings)

    @cached_property
    def _members(self) -> list[Any]:
        return [*members(self._state)]

    @cached_property
    def _states(self) -> list[Any]:
        """What the objects of the state save that are not PyTorch's."""
        return [
            value.state_dict()
            for value in self._members
            if hasattr(value, "state_dict")
            and not isinstance(value, (type, torch.nn.Module, *STEPPING))
        ]

    @cached_property
    def _mappings(self) -> list[Mapping[Any, Any]]:
        """The mappings in the state, and in what objects of it save that are not PyTorch's."""
        found = members([self._state, *self._states])
        return [value for value in found if isinstance(value, Mapping)]

    @cached_property
    def _copied(self) -> set[tuple[Any, ...]]:
        """The forms of tensors that such objects save, which may be copies (on the CPU)."""
        return {_form(tensor) for state in self._states for tensor in _tensors(state)}

    @cached_property
    def _stepped(self) -> set[int]:
        groups = [getattr(value, "param_groups", ()) for value in self.optimizers.values()]
        tensors = [tensor for part in groups for group in part for tensor in group["params"]]
        return set(map(_memory, tensors)) - {0}

    @cached_property
    def _memory(self) -> set[int]:
        tensors = [value for value in self._members if isinstance(value, torch.Tensor)]
        for value in self._members:
            if isinstance(value, torch.nn.Module):
                tensors += [*value.parameters(), *value.buffers()]
        for optimizer in self.optimizers.values():
            tensors += _tensors(dict(getattr(optimizer, "state", {})))
        for mapping in self._mappings:
            tensors += [value for value in mapping.values() if isinstance(value, torch.Tensor)]
        return {_memory(value) for value in tensors} - {0}


def _memory(tensor: torch.Tensor) -> int:
    """Where the elements of a tensor begin; 0 if they are in no memory of this process."""
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # of a subclass, or sparse
        return 0


def unsaved_inner(owner: Any, saved: SavedValues) -> Iterator[tuple[str, Any]]:
    """The optimizers, schedulers and gradient scalers among the attributes of a module or an optimizer
    that have something to lose and that no checkpoint has, each with its dotted name."""
    if isinstance(owner, torch.nn.Module):
        parts: Any = own_parts(owner)
    elif isinstance(owner, torch.optim.Optimizer) and not is_from_library(type(owner)):
        parts = [("", owner)]
    else:
        return
    for prefix, part in parts:
        for name, value in vars(part).items():
            if name in _OWN or type(value) in _CLOSED:
                continue
            found: list[tuple[str, Any]] = []
            with suppress(Exception):  # of an object of the program: then it is not looked at
                found = _inner(value)
            for place, inner in found:
                if _has_state(inner) and not _saves(part, inner) and not saved.has_state_of(inner):
                    yield f"{prefix}.{name}{place}" if prefix else name + place, inner


def own_parts(
    module: torch.nn.Module, *, every: bool = False
) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and those in it by dotted name, without those of libraries (unless `every`) and without
    those of which a class of the program decides what is saved."""
    parts, seen = [("", module)], {id(module)}
    while parts:  # `named_modules` takes three times as long
        name, part = parts.pop()
        if _decides(type(part)):
            continue
        if every or is_own_module(type(part)):
            yield name, part
        for key, child in reversed(part._modules.items()):
            if child is None or id(child) in seen:
                continue
            if every or child._modules or is_own_module(type(child)):
                seen.add(id(child))
                parts.append((f"{name}.{key}" if name else key, child))


@cache
def is_own_module(kind: type) -> bool:
    """Whether a module is the program's: of its class, or a plain container."""
    return not is_from_library(kind) or kind in CONTAINERS


@cache
def _decides(kind: type) -> bool:
    """Whether a class that is from no library says itself what is saved of a module."""
    own = [vars(base) for base in kind.__mro__ if not is_from_library(base)]
    return any(name in attributes for attributes in own for name in _SAVING)


def _inner(value: Any) -> list[tuple[str, Any]]:
    """The optimizers and the like in an attribute, each with what follows the attribute's name."""
    found: list[tuple[str, Any]] = []
    nodes, seen = deque([("", value, 0)]), {id(value)}
    for _ in range(MOST):
        if not nodes:
            break
        place, part, depth = nodes.popleft()
        kind = type(part)
        if issubclass(kind, STEPPING):
            found.append((place, part))
            continue
        if depth == DEPTH or kind in _CLOSED:
            continue
        if issubclass(kind, (list, tuple)):
            children = [(f"{place}[{n}]", child) for n, child in enumerate(islice(part, MOST))]
        elif issubclass(kind, dict):
            items = islice(part.items(), MOST)
            children = [(f"{place}[{_shown(key)}]", child) for key, child in items]
        elif is_of_program(kind) and not issubclass(kind, torch.nn.Module):
            children = [(f"{place}.{name}", child) for name, child in vars(part).items()]
        else:
            continue
        for name, child in children:
            if type(child) not in _CLOSED and id(child) not in seen:
                seen.add(id(child))
                nodes.append((name, child, depth + 1))
    return found


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else f"a {type(key).__name__}"


@cache
def is_of_program(kind: type) -> bool:
    """Whether a class is a namespace, or from the user's code."""
    if kind is SimpleNamespace:
        return True
    if is_from_library(kind) or issubclass(kind, enum.Enum):
        return False
    package = str(kind.__module__).partition(".")[0]
    if package in ("builtins", "perdure") or package in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "-packages" not in file


def _has_state(inner: Any) -> bool:
    """Whether a fresh one would differ, of what a save can see at once."""
    if isinstance(inner, torch.optim.Optimizer):
        return any(True for _ in _tensors(dict(getattr(inner, "state", {}))))
    if isinstance(inner, torch.amp.GradScaler):
        return bool(inner.state_dict())
    return getattr(inner, "last_epoch", 1) != 0


def _saves(owner: Any, inner: Any) -> bool:
    """Whether an optimizer that owns `inner` saves it. A module does not."""
    if isinstance(owner, torch.nn.Module):
        return False
    inherits = type(owner).state_dict is torch.optim.Optimizer.state_dict
    if not isinstance(inner, torch.optim.Optimizer):
        return not inherits
    needed, saved = [*_tensors(dict(inner.state))], [*_tensors(owner.state_dict())]
    if inherits:
        return {id(value) for value in needed} <= {id(value) for value in saved}
    # which may return copies
    return not Counter(map(_form, needed)) - Counter(map(_form, saved))


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors(child)


class SteppedTensors:
    """Finds the tensors that the optimizers of a state step and no member of it has.

    A tensor that no step has changed is left alone: it may be there for the schedule alone.
    """

    def __init__(self) -> None:
        self._named: set[str] = set()
        # By path, the tensors that were in the state, and the versions of those that were not.
        self._inside: dict[str, set[int]] = {}
        self._versions: dict[str, dict[int, int]] = {}

    def outside(self, saved: SavedValues) -> Iterator[tuple[str, str]]:
        """The paths of optimizers, each with its first such tensor in words; each optimizer once."""
        groups = {
            path: [group["params"] for group in getattr(optimizer, "param_groups", ())]
            for path, optimizer in saved.optimizers.items()
        }
        stepped = {path: set(map(id, chain(*parts))) for path, parts in groups.items()}
        if not stepped or all(map(saved.parameters.isdisjoint, stepped.values())):
            return  # the program saves its model elsewhere
        for path, numbers in stepped.items():
            if numbers <= saved.parameters:
                self._inside[path] = numbers
            elif path not in self._named:
                found = [
                    f"number {n} of group {group}, {tuple(tensor.shape)} {tensor.dtype}"
                    for group, part in enumerate(groups[path])
                    for n, tensor in enumerate(part)
                    if tensor.requires_grad and not saved.has(tensor)
                    if self._is_in_use(path, saved.optimizers[path], tensor)
                ]
                if found:
                    self._named.add(path)
                    more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
                    yield path, found[0].replace("torch.", "") + more

    def _is_in_use(self, path: str, optimizer: Any, tensor: torch.Tensor) -> bool:
        version = self._versions.setdefault(path, {}).setdefault(id(tensor), tensor._version)
        return (
            tensor.grad is not None
            or version != tensor._version
            or id(tensor) in self._inside.get(path, ())
            or bool(getattr(optimizer, "state", {}).get(tensor))
        )
