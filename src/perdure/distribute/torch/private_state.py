"""A state for the thread of one device, with modules, containers and objects of its own.

Parameters are over the memory of the user's. Everything else that a replica may write to is a copy, so
that each thread finds what a device by itself would find, and what was written can be noticed.
"""

from __future__ import annotations

import argparse
import contextvars
import copy
import dataclasses
import enum
import functools
import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perdure.checkpoint import Checkpoint
from perdure.distribute.torch import state_view
from perdure.errors import StateError

Content = dict[Any, Any] | list[Any] | set[Any] | tuple[Any, ...]

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.Size))
_CONTAINERS = (dict, list, deque, set, OrderedDict, defaultdict, Counter)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = [name for name, value in vars(nn.Module()).items() if "hook" in name and value == {}]
_BAGS = (types.SimpleNamespace, argparse.Namespace, Checkpoint)
_COMPARED_BYTES = 4 << 20
"""With a larger array, comparing its bytes in every step would cost more than the threads gain."""


@dataclasses.dataclass
class DeviceThread:
    """What a thread of a device has.

    Attributes:
        generator: The generator to seed in place of the process's, which is watched.
        reached: Whether it has used a parameter or a buffer of the user's.
    """

    generator: torch.Generator
    reached: bool = False


device_thread: contextvars.ContextVar[DeviceThread | None] = contextvars.ContextVar(
    "device_thread", default=None
)


def in_use() -> StateError:
    """The error for a use of the user's parameters and buffers while several devices compute."""
    if (thread := device_thread.get()) is not None:
        thread.reached = True  # the user's code may catch the error
    return StateError(
        "a parameter or a buffer of the state was used by another thread while a step computes on "
        "several devices of this process. Use it between two steps, or copy it there for the other "
        "thread (copy.deepcopy(model.state_dict()))"
    )


class ThreadParameter(nn.Parameter):
    """The parameter of one thread, whose hash is that of the user's parameter.

    So a dict or a set of the user's that has the user's parameter as a key compares the two, which is
    an error as every use of the user's parameter is.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        return id(self) if self._hash is None else self._hash

    def __eq__(self, other: Any) -> Any:
        # A key that another thread has left, or the user's parameter beside one.
        if self is not other and isinstance(other, nn.Parameter) and hash(other) == hash(self):
            raise in_use()
        return super().__eq__(other)


class PrivateState:
    """A state around modules of its own.

    Args:
        state: The user's state.
        trained: The tensors that a replica may compute gradients of.
        compiled: Whether `grad` is compiled.

    Attributes:
        state: The state of one thread.
        originals: The modules, containers and objects of the user's that were copied.
        arrays: The NumPy arrays among them, which are not copied.
        hooks: The tables of hooks of the user's modules, and how many each has.
        tensors: The tensors among them that are none of the state's, and are not copied either.
        is_complete: Whether all that `grad` may write to is its own or is compared.
    """

    def __init__(self, state: Any, trained: Iterable[Tensor], compiled: bool) -> None:
        self.originals: list[Any] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.tensors: list[Tensor] = []
        self.hooks: list[tuple[dict[Any, Any], int]] = []
        self.is_complete = True
        self._trained = {id(tensor) for tensor in trained}
        self._memo: dict[int, Any] = {}
        self._hooks: list[tuple[dict[Any, Any], int]] = []
        # Each module, container and object, with what it was given.
        self._made: list[tuple[Any, Content]] = []
        self.state = self._own(state)
        # A compiled program is of the types that it has seen, and the reference has parameters.
        for number, new in self._memo.items() if not compiled else ():
            if type(new) is nn.Parameter:
                own: Any = new
                own.__class__, own._hash = ThreadParameter, number
        # Attributes of a parameter, and whether it is trained, are written to the parameter itself.
        parameters = [new for new in self._memo.values() if isinstance(new, Tensor)]
        self._trains = [(own, own.requires_grad) for own in parameters]
        self._made += [(own, dict(vars(own))) for own in parameters if vars(own)]
        made = {id(new) for new in self._memo.values()}
        # Other modules may be in objects that are not copied.
        others = state_view.modules(self.state)
        self.is_complete = self.is_complete and all(id(module) in made for _, module in others)

    def has_changed(self) -> bool:
        """Whether `grad` has left something else in a module, container or object than it found.

        A counter of calls may decide nothing in the first step, and would begin again in each.
        """
        if any(own.requires_grad is not trains for own, trains in self._trains):
            return True
        if any(len(table) != count for table, count in self._hooks):
            return True
        return any(differs(value, given) for value, given in self._made)

    def _own(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if issubclass(kind, nn.Module):  # what a `weakref.proxy` is not
            return self._module(value)
        if issubclass(kind, Tensor):
            return self._tensor(value)
        if kind in _CONTAINERS:
            return self._container(value)
        if kind is tuple or hasattr(kind, "_fields"):
            children = [self._own(child) for child in value]
            if all(new is old for new, old in zip(children, value, strict=True)):
                return value
            return kind(*children) if hasattr(value, "_fields") else kind(children)
        if isinstance(value, np.ndarray):
            self.arrays.append(value)
            self.is_complete &= value.nbytes <= _COMPARED_BYTES
        elif (how := _treatment(kind)) is _Treatment.COPIED:
            own = copy.copy(value) if kind in _BAGS else object.__new__(kind)
            self._memo[id(value)] = own
            given = {name: self._own(child) for name, child in vars(value).items()}
            vars(own).update(given)
            self._note(own, value, given)
            return own
        elif how is _Treatment.UNKNOWN:
            self.is_complete = False
        return value

    def _container(self, value: Any) -> Any:
        own = self._memo[id(value)] = copy.copy(value)
        if isinstance(own, dict | set):
            # What is a key or an element stays itself, so that it is found.
            kinds = set(map(type, own))
            self.is_complete &= all(_treatment(kind) is _Treatment.SHARED for kind in kinds)
        if isinstance(own, dict):
            if not _PLAIN.issuperset(map(type, own.values())):
                for name, child in value.items():
                    own[name] = self._own(child)
        elif not isinstance(own, set) and not _PLAIN.issuperset(map(type, own)):
            for index, child in enumerate(value):
                own[index] = self._own(child)
        self._note(own, value, content(own))
        return own

    def _note(self, own: Any, value: Any, given: Content) -> None:
        self._made.append((own, given))
        self.originals.append(value)

    def _tensor(self, value: Tensor) -> Tensor:
        if id(value) in self._trained and value.is_leaf:
            own = _same_memory(value)
            if type(value) is not nn.Parameter:
                own = value.detach().requires_grad_(value.requires_grad)
            self._memo[id(value)] = own
            return own
        self.tensors.append(value)
        return value

    def _module(self, module: nn.Module) -> nn.Module:
        """The same module with its own `.grad`, buffers and attributes, over the same parameters."""
        if hasattr(type(module), "__del__"):
            self.is_complete = False
            return module
        own = self._memo[id(module)] = object.__new__(type(module))
        given = module.__dict__ | {
            "_parameters": {k: self._once(p, _same_memory) for k, p in module._parameters.items()},
            "_buffers": {k: self._once(b, _clone) for k, b in module._buffers.items()},
            "_modules": {k: self._own(m) for k, m in module._modules.items()},
        }
        for name in _HOOKS:  # `grad` may register some, and remove them
            given[name] = given[name].copy()
        for name, value in given.items():
            if name not in _OF_EVERY_MODULE and type(value) not in _PLAIN:
                given[name] = self._own(value)
        own.__dict__.update(given)
        self._note(own, module, given)
        for name in ("_parameters", "_modules"):
            self._made.append((given[name], dict(given[name])))
        for name in _HOOKS:
            self._hooks.append((given[name], len(given[name])))
            self.hooks.append((module.__dict__[name], len(given[name])))
        return own

    def _once(self, tensor: Tensor | None, copied: Callable[[Any], Any]) -> Any:
        if tensor is not None and id(tensor) not in self._memo:
            self._memo[id(tensor)] = copied(tensor)
        return None if tensor is None else self._memo[id(tensor)]


class _Treatment(enum.Enum):
    """What a thread gets of an object that is no module, tensor or container.

    Attributes:
        COPIED: A bag of attributes: of a class of the user's own, or a dataclass.
        SHARED: That of a library, which is taken to be the same for every replica.
        UNKNOWN: Of a class of the user's that nobody else can make an object of.
    """

    COPIED = enum.auto()
    SHARED = enum.auto()
    UNKNOWN = enum.auto()


@functools.cache
def _treatment(kind: type) -> _Treatment:
    if kind in _BAGS:
        return _Treatment.COPIED
    if issubclass(kind, (*state_view.CLOSED, enum.Enum)) and not _is_container(kind):
        return _Treatment.SHARED
    can_copy = kind.__new__ is object.__new__ and kind.__dictoffset__ and not _is_container(kind)
    # The end of a copy would close what the user's object has open.
    can_copy = can_copy and not hasattr(kind, "__del__")
    if can_copy and dataclasses.is_dataclass(kind):
        return _Treatment.COPIED
    package = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    is_library = "site-packages" in file or package in sys.stdlib_module_names - {"__main__"}
    if (is_library and not _is_container(kind)) or package == "perdure":
        return _Treatment.SHARED
    return _Treatment.COPIED if can_copy else _Treatment.UNKNOWN


def _is_container(kind: type) -> bool:
    """Whether it is a container with code of its own, which may give other values than it holds."""
    return issubclass(kind, (dict, list, deque, set, tuple)) and kind is not tuple


def content(value: Any) -> Content:
    """What a module, a container or an object has now."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set):
        return set(value)
    return list(value) if isinstance(value, (list, deque)) else dict(vars(value))


def differs(value: Any, given: Content) -> bool:
    """Whether a module, a container or an object has something else than `given`."""
    now = _entries(value, given)
    if len(now) != len(given):
        return True
    if isinstance(given, set):
        return {*map(_key, now)} != {*map(_key, given)}
    if isinstance(given, dict):
        new, old = now.values(), given.values()
        if not all(map(operator.is_, now, given)) and not all(map(_is_same, now, given)):
            return True
    else:
        new, old = now, given
    return not all(
        one is other or _is_same(one, other) for one, other in zip(new, old, strict=True)
    )


def _entries(value: Any, given: Content) -> Any:
    has_attributes = isinstance(given, dict) and not isinstance(value, dict)
    return vars(value) if has_attributes else value


def put_back(value: Any, given: Content) -> None:
    """Give a module, a container or an object what it had."""
    now = _entries(value, given)
    now.clear()
    if isinstance(given, dict):
        for name, child in given.items():
            now[name] = child
    elif isinstance(given, set):
        now.update(given)
    else:
        now.extend(given)


def _is_same(new: Any, old: Any) -> bool:
    """Whether two values are one object, or equal ones that nothing can change."""
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    if type(new) in _PLAIN:
        return repr(new) == repr(old)  # a NaN is equal to itself, and 0.0 not to -0.0
    if isinstance(new, np.generic):
        return new.tobytes() == old.tobytes()
    if isinstance(new, (tuple, *_CONTAINERS)):
        return not differs(new, old if isinstance(old, tuple) else content(old))
    return False


def _key(element: Any) -> Any:
    return element if type(element) in _PLAIN else id(element)


def _same_memory(parameter: Any) -> Any:
    own = nn.Parameter(parameter.detach(), parameter.requires_grad)
    if attributes := vars(parameter):  # that the user has set
        vars(own).update(attributes)
    return own


def _clone(buffer: Any) -> Any:
    return buffer.detach().clone()
