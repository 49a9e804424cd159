"""Finds a program that uses a dict or a list that it gave to a restore, and saves the restored one.

A restore returns new containers. An object of the program that still has the old one (`ema.shadow`)
puts its new values there, so that every later checkpoint would have the restored values again.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from perdure.errors import StateError
from perdure.state.adapter import loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.leaf_values import SCALARS, same_bits
from perdure.state.paths import ancestors, is_below, join_key
from perdure.state.shards import own_shards_only
from perdure.state.stateful import Stateful
from perdure.state.tree_flatten import flatten

_MISSING: Any = object()


class _Mark(Struct, frozen=True, gc=False):
    """Recognizes a member of a container, and keeps no array alive."""

    value: Any  # of a number; None for others
    reference: weakref.ref[Any] | None
    identity: int
    version: int | None

    @classmethod
    def of(cls, member: Any) -> _Mark:
        if type(member) is np.ndarray:  # nearly every member
            return cls(None, weakref.ref(member), id(member), None)
        if type(member) in SCALARS or isinstance(member, np.generic):
            return cls(member, None, 0, None)
        try:
            reference = weakref.ref(member)
        except TypeError:
            reference = None
        return cls(None, reference, id(member), _version(member))

    def is_of(self, member: Any) -> bool:
        if not self.identity:
            return type(member) is type(self.value) and repr(member) == repr(self.value)
        return id(member) == self.identity and (
            self.reference is None or self.reference() is member
        )


class _WatchedContainer(NamedTuple):
    path: str
    old: Any
    members: Mapping[str, _Mark]
    restored: Mapping[str, _Mark]
    has_arrays: bool

    def changed(self) -> dict[str, Any]:
        """The members that the program has put into the old container, by key."""
        return {
            key: member
            for key, member in _children(self.old, self.path)
            if key in self.members and not self.members[key].is_of(member)
        }


class ReplacedContainers:
    """The containers in whose place a restore returned others, for as long as the program has them.

    Those with arrays of JAX are left out: to watch one is to keep its arrays in the memory of a device.
    Those with other arrays are only watched if something beside the target refers to them.
    """

    def __init__(self) -> None:
        self._watched: list[_WatchedContainer] = []
        self._with_arrays: set[str] = set()
        self._with_device_arrays: set[str] = set()
        self._is_taken = False

    def add_array(self, path: str, old: Any) -> None:
        """The array `old` was replaced: the containers above `path` keep it alive."""
        is_plain = isinstance(old, np.ndarray) or type(old).__module__.startswith("torch")
        container = path.rpartition("/")[0]
        if container in self._with_arrays and (is_plain or container in self._with_device_arrays):
            return  # as nearly always: there may be very many arrays
        for paths in [self._with_arrays] + [self._with_device_arrays] * (not is_plain):
            for above in ancestors(container):
                if above in paths:
                    break
                paths.add(above)

    def add(
        self, path: str, old: Any, children: Iterable[tuple[str, Any]], members: Sequence[Any]
    ) -> None:
        """A new container with `members` was returned in place of `old`, which had `children`.

        Those were added before.
        """
        if path in self._with_device_arrays or not _is_mutable(old):
            return
        before = {key: _Mark.of(member) for key, member in children}
        after = {key: _Mark.of(member) for (key, _), member in zip(children, members, strict=True)}
        self._watched.append(_WatchedContainer(path, old, before, after, path in self._with_arrays))

    def taken(self) -> None:
        """The program has the restored state: release the arrays that only the target refers to."""
        if not self._is_taken:
            self._is_taken = True
            self._release(also_of_target=True)

    def clear(self) -> None:
        """Nothing was restored."""
        for collection in (self._watched, self._with_arrays, self._with_device_arrays):
            collection.clear()
        self._is_taken = False

    def check_unused(self, state: Any) -> None:
        """Raise `StateError` if `state`, which is saved now, has restored members in whose place the
        program has put others into the container that it gave to the restore."""
        if not self._watched:
            return
        self._release()
        by_path = {watched.path: watched for watched in self._watched if watched.changed()}
        if by_path:
            with own_shards_only():
                self._visit(state, "", by_path)

    def _release(self, *, also_of_target: bool = False) -> None:
        """Forget the containers that nothing refers to but this object.

        With `also_of_target`, also those with arrays to which only their container in the target
        refers, if that is alive. The outer ones come first, because they refer to the inner ones.
        """
        kept: list[_WatchedContainer] = []
        alive: set[str] = set()
        while self._watched:
            watched = self._watched.pop()
            others = sys.getrefcount(watched.old) - _OWN_REFERENCES
            if others:
                alive.add(watched.path)
            if also_of_target and watched.has_arrays:
                # The state itself is in a variable of the program, which gets the restored one.
                others -= watched.path.rpartition("/")[0] in alive or not watched.path
            if others > 0:
                kept.append(watched)
            del watched
        self._watched = kept[::-1]

    def _visit(self, value: Any, path: str, by_path: Mapping[str, _WatchedContainer]) -> None:
        if leaf_adapter(value, loaded_adapters()) is not None:
            return
        node = node_of(value, path, loaded_adapters(), None)
        if isinstance(node, Stateful):
            return
        watched = by_path.get(path)
        if watched is not None and value is not watched.old:
            _compare(watched, dict(node.children))
        for key, child in node.children:
            inside = join_key(path, key)
            if any(is_below(other, [inside]) for other in by_path):
                self._visit(child, inside, by_path)


def _compare(watched: _WatchedContainer, saved: Mapping[str, Any]) -> None:
    for key, member in watched.changed().items():
        restored, mark = saved.get(key, _MISSING), watched.restored.get(key)
        if restored is _MISSING or mark is None or not mark.is_of(restored):
            continue
        if _version(restored) != mark.version or _same(member, restored):
            continue
        kind = type(watched.old).__name__
        raise StateError(
            f"{join_key(watched.path, key) or '(the state itself)'}: the program has put a new value "
            f"into the {kind} that it gave to the restore, and saves the one that the "
            f"restore returned, so that every later checkpoint would have the restored value again. "
            f"Let the program continue with the restored {kind} (`ema.shadow = "
            f"state['ema']`), or save the object that owns it, with `state_dict` and `load_state_dict`."
        )


def _is_mutable(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    return dataclasses.is_dataclass(value) and parameters is not None and not parameters.frozen


def _children(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    try:
        node = node_of(value, path, loaded_adapters(), None)
    except StateError:  # the program has put something into it that is no state
        return ()
    return () if isinstance(node, Stateful) else node.children


def _version(value: Any) -> int | None:
    try:
        return getattr(value, "_version", None)
    except RuntimeError:  # of an inference tensor
        return None


def _same(one: Any, other: Any) -> bool:
    try:
        first, second = flatten(one), flatten(other)
    except StateError:
        return False
    return first.keys() == second.keys() and all(same_bits(first[p], second[p]) for p in first)


def _own_references() -> int:
    watched = _WatchedContainer("", [], {}, {}, False)
    return sys.getrefcount(watched.old)


_OWN_REFERENCES = _own_references()
