"""The states of objects with `load_state_dict`: taken apart for a save, built again for a restore.

The state that an object is given is the one that was stored, container by container; its own present
state only says where arrays lie, and provides live objects that the state contains.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Difference, Names, Spec, Stateful
from perdure.state.builtin import key_name, plain_value
from perdure.state.containers import (
    PLAIN,
    array_class,
    array_template,
    described,
    made,
)
from perdure.state.walk import (
    Named,
    adapters,
    join,
    leaf_adapter,
    load_leaf,
    name_error,
    node_of,
    type_name,
)
from perdure.store.format import SCALAR_PREFIX, children_of, unescape
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import Container

_MISSING: Any = object()
# Where two values are compared, a conversion that fails means that they differ.
_NOT_CONVERTED = (StateError, ValueError, TypeError)
Below = Callable[[Sequence[tuple[str, Any]], str], None]
Build = Callable[[Any, str], Any]


class Collector:
    """Puts the state of one object into `leaves`. `below` collects the children of other values in
    it; without it they are left out, and their paths are in `live`."""

    def __init__(self, among: Sequence[Adapter], leaves: Leaves, below: Below | None) -> None:
        self._adapters = among
        self._leaves = leaves
        self._below = below
        self._classes: dict[str, str] = {}
        self.live: list[str] = []

    def collect(self, found: Stateful, path: str) -> None:
        state = read(found, path)
        try:
            if isinstance(state, Names):
                common = found.arrays
                for name, value in state.items():
                    self._value(value, named(path, name), listed=True)
            else:
                self._value(state, path, listed=True)
                common = self._common(path)
        except RecursionError:
            raise UnsupportedLeafError(
                f"{path}: the state of a {type_name(found.target)} contains itself, or is nested too "
                f"deeply."
            ) from None
        for at, name in self._classes.items():
            if name != common:
                self._leaves.containers[at] = Container("array", arrays=name)

    def _common(self, path: str) -> str | None:
        """The class of most arrays, which the entry of the whole state gets."""
        entry = self._leaves.containers.get(path)
        if path in self._classes or entry is None or entry.type is not None:
            return None
        ranked = Counter(self._classes.values()).most_common()
        common: Any = min((name for name, count in ranked if count == ranked[0][1]), default=None)
        self._leaves.containers[path] = msgspec.structs.replace(entry, arrays=common)
        return common

    def _value(self, value: Any, path: str, *, listed: bool = False) -> None:
        # The loop of the user stands still here, as in `tree._collect`.
        try:
            for adapter in self._adapters:
                if (leaf := adapter.leaf(value)) is not None:
                    if path in self._leaves:
                        raise two_leaves(path)
                    self._leaves[path] = leaf
                    if leaf.dtype[:3] != SCALAR_PREFIX:
                        self._classes[path] = array_class(value)
                    return
            plain = described(value)
            if plain is None:
                self._live(value, path)
                return
        except StateError as error:
            name_error(error, path)
            raise
        entry, children = plain
        if listed or not children or entry != PLAIN:
            self._leaves.containers[path] = entry
        for key, child in children:
            self._value(child, join(path, key))

    def _live(self, value: Any, path: str) -> None:
        node = node_of(value, path, self._adapters, None)
        self.live.append(path)
        if self._below is None:
            return
        if isinstance(node, Stateful):
            Collector(self._adapters, self._leaves, self._below).collect(node, path)
        else:
            self._below(node.children, path)
        entry = self._leaves.containers.get(path) or Container("object")
        self._leaves.containers[path] = msgspec.structs.replace(entry, type=type_name(value))


class Stored:
    """The leaves of a checkpoint, from which the states of objects are built."""

    def __init__(self, leaves: Mapping[str, Leaf], build: Build) -> None:
        self.leaves = leaves
        self.containers = containers_of(leaves)
        self._build = build
        self._adapters = adapters()
        self.missing: list[Difference] = []

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        return children_of([*self.leaves, *self.containers])

    def _leaves_under(self, path: str) -> Iterator[str]:
        """The paths of the leaves at `path` and below it; those of other objects are not looked at."""
        if path in self.leaves:
            yield path
        for part in self._children.get(path, ()):
            yield from self._leaves_under(_at(path, part))

    def state(self, found: Stateful, path: str) -> Any:
        """The state to give to an object. One that is not there at all is added to `missing`."""
        fresh = read(found, path)
        if isinstance(fresh, Names):
            older = {} if self.containers else self._containers_in(fresh, path, found.arrays)
            return dict(older.values()) | {
                name: self._value(at, fresh.get(name, _MISSING), found.arrays)
                for at, name in self._names(path, "")
                if not _below(at, tuple(older))
            }
        if leaf_adapter(fresh, self._adapters) is None and described(fresh) is None:
            return self._build(fresh, path)  # a live object in place of a state
        if path in self.containers or path in self.leaves:
            return self._value(path, fresh, found.arrays, root=True)
        state = self._guessed(path, fresh, found.arrays)
        if path not in self._children and _has_leaves(fresh):
            wanted = f"the state of a {type_name(found.target)}"
            self.missing.append(Difference(path, wanted))
        return state

    def digests(self, found: Stateful, path: str) -> dict[str, list[str]] | None:
        """What tells the present state of an object from another one; None if it cannot be said."""
        leaves = Leaves()
        try:
            Collector(self._adapters, leaves, None).collect(found, path)
        except StateError:
            return None
        return {at: [leaf.dtype, str(leaf.shape), *leaf.hashes()] for at, leaf in leaves.items()}

    def differences(self, found: Stateful, path: str) -> list[Difference]:
        """How the state of an object differs from the one that was stored for it."""
        now = _Compared(self.leaves)
        collector = Collector(self._adapters, now, None)
        collector.collect(found, path)
        lines = now.lines
        prefix = f"{path}/" if path else ""
        live = tuple(collector.live)
        for at in self._leaves_under(path):
            if at not in now and not _below(at, live):
                lines.append(Difference(at, None, self.leaves[at].describe()))
        adds = {line.path for line in lines if line.found is None}
        adds = {at for at in adds if found.adds(at[len(prefix) :])}
        return sorted((line for line in lines if line.path not in adds), key=lambda line: line.path)

    def _value(self, path: str, like: Any, arrays: str, *, root: bool = False) -> Any:
        entry = self.containers.get(path)
        if entry is not None and entry.type is not None and not root:
            return self._live(path, like, entry.type)
        if entry is not None and entry.arrays is not None:
            arrays = entry.arrays
        if path in self.leaves:
            return self._leaf(path, like, arrays)
        return made(
            entry or PLAIN,
            self._children.get(path, ()),
            lambda key, part: self._value(_at(path, part), _child(like, key), arrays),
        )

    def _live(self, path: str, like: Any, type_: str) -> Any:
        if like is _MISSING or leaf_adapter(like, self._adapters) or described(like) is not None:
            has = "nothing" if like is _MISSING else f"a {type_name(like)}"
            raise MismatchError(
                f"{path}: the state that was stored has a {type_} there, and the target {has}; nothing "
                f"was changed. Only an object of that class can rebuild it: give the target one."
            )
        return self._build(like, path)

    def _leaf(self, path: str, like: Any, arrays: str) -> Any:
        leaf = self.leaves[path]
        if leaf.is_scalar:
            return plain_value(leaf)
        with Named(path):
            target = array_template(arrays, leaf, like)
            if like is not _MISSING and array_class(like).split("@")[0] == arrays.split("@")[0]:
                with suppress(*_NOT_CONVERTED):
                    taken = leaf_adapter(like, self._adapters)
                    if taken is not None and taken[1] == Spec.of(leaf):
                        target = like
            chosen = leaf_adapter(target, self._adapters)
            assert chosen is not None
            value = load_leaf(chosen[0], target, leaf)
        return value.copy() if isinstance(value, np.ndarray) else value

    def _names(self, path: str, name: str) -> Iterator[tuple[str, str]]:
        for part in self._children.get(path, ()):
            at = _at(path, part)
            below = f"{name}.{unescape(part)}" if name else unescape(part)
            if at in self.leaves or at in self.containers:
                yield at, below
            else:
                yield from self._names(at, below)

    def _containers_in(self, fresh: Names, path: str, arrays: str) -> dict[str, tuple[str, Any]]:
        """Lists and dicts among the values of a module, in a checkpoint without containers."""
        values = {}
        for name, value in fresh.items():
            if described(value) is not None:
                at = named(path, name)
                values[at] = (name, self._guessed(at, value, arrays))
        return values

    def _guessed(self, path: str, like: Any, arrays: str) -> Any:
        """A value of a checkpoint that does not describe containers: of the kind that `like` has."""
        if path in self.leaves:
            known = None if like is _MISSING else leaf_adapter(like, self._adapters)
            is_array = known is not None and not known[1].dtype.startswith(SCALAR_PREFIX)
            return self._leaf(path, like, array_class(like) if is_array else arrays)
        parts = self._children.get(path, [])
        plain = None if like is _MISSING else described(like)
        if plain is None:
            if like is not _MISSING and leaf_adapter(like, self._adapters) is None:
                return self._build(like, path)
            numbered = set(parts) == {str(i) for i in range(len(parts))}
            plain = Container("list" if numbered else "dict"), []
        entry = plain[0]
        if isinstance(like, Mapping):
            keys = {key_name(key): key for key in like}
            numbers = not any(isinstance(key, str) for key in like)
            for part in parts:
                text = unescape(part)
                if text not in keys:
                    keys[text] = int(text) if numbers and text.isdigit() else text
            names = {unescape(part) for part in parts}
            kept = [
                key for text, key in keys.items() if text in names or _is_container(like.get(key))
            ]
            entry = msgspec.structs.replace(entry, keys=tuple(kept))
        return made(
            entry,
            parts,
            lambda key, part: self._guessed(_at(path, part), _child(like, key), arrays),
        )


def read(found: Stateful, path: str) -> Any:
    """The present state of an object; whatever it raises becomes a `StateError`."""
    with Named(path):
        try:
            return found.read()
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                f"a {type_name(found.target)} did not return its state: "
                f"{type(error).__name__}: {error}"
            ) from error


def two_leaves(path: str) -> UnsupportedLeafError:
    """The error about two values with one path."""
    return UnsupportedLeafError(f"two leaves have the path {path!r}; rename one of the keys.")


def copied(state: Any) -> Any:
    """A state with containers and arrays of its own; live objects in it stay what they are."""
    if isinstance(state, Names):
        return Names({name: copied(value) for name, value in state.items()})
    if isinstance(state, np.ndarray):
        return state.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        clone = state.detach().clone()
        if type(clone) is not type(state):
            return type(state)(clone, state.requires_grad)
        return clone.requires_grad_(state.requires_grad)
    if (plain := described(state)) is None:
        return state
    entry, children = plain
    values = {join("", key): child for key, child in children}
    return made(entry, list(values), lambda _, part: copied(values[part]))


def same(stored: Leaf, now: Leaf) -> bool:
    """Whether two leaves have the same bits; a number may have become another kind of number."""
    if (stored.dtype, stored.shape) == (now.dtype, now.shape):
        return len(stored.data) == len(now.data) and np.array_equal(
            np.frombuffer(stored.data, np.uint8), np.frombuffer(now.data, np.uint8)
        )
    if stored.shape or now.shape or not {stored.is_scalar, now.is_scalar} & {True}:
        return False
    with suppress(*_NOT_CONVERTED):
        one, other = (np.asarray(plain_value(leaf)).item() for leaf in (stored, now))
        numbers = (bool, int, float)
        return isinstance(one, numbers) and isinstance(other, numbers) and one == other
    return False


class _Compared(Leaves):
    """Takes leaves to compare them one by one, and keeps none of their bytes."""

    def __init__(self, stored: Mapping[str, Leaf]) -> None:
        super().__init__()
        self._stored = stored
        self.lines: list[Difference] = []

    def __setitem__(self, path: str, leaf: Leaf) -> None:
        super().__setitem__(path, Leaf(leaf.dtype, leaf.shape, memoryview(b"")))
        stored = self._stored.get(path)
        if stored is None:
            self.lines.append(Difference(path, leaf.describe(), None))
        elif not same(stored, leaf):
            one, other = stored.describe(), leaf.describe()
            has = "other bits" if one == other else other
            self.lines.append(
                Difference(path, reason=f"stored {one}, the object has {has} after the load")
            )


def _child(like: Any, key: Any) -> Any:
    try:
        return like[key] if isinstance(like, (Mapping, Sequence)) else _MISSING
    except (KeyError, IndexError, TypeError):
        return _MISSING


def _is_container(value: Any) -> bool:
    return value is not None and described(value) is not None


def _has_leaves(value: Any) -> bool:
    plain = described(value)
    return plain is None or any(_has_leaves(child) for _, child in plain[1])


def _below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def named(path: str, name: str) -> str:
    """The path of a value of a module."""
    if "/" not in name and "%" not in name:
        return f"{path}/{name.replace('.', '/')}" if path else name.replace(".", "/")
    for part in name.split("."):
        path = join(path, part)
    return path


def _at(path: str, part: str) -> str:
    return f"{path}/{part}" if path else part
