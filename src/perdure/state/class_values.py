"""Class attributes that a run changes, in the classes of the objects of a state: `Agent.count += 1`,
`type(self).losses.append(x)`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.attribute_values import ValueKind, kind_of, mark_of, put_value, stored_form
from perdure.state.extra_members import ExtraMember, Restoring, Saving, json_leaf
from perdure.state.leaf_values import CONTAINERS
from perdure.state.object_restore import ObjectStates
from perdure.state.paths import join_part
from perdure.state.program_code import is_user_class
from perdure.state.snapshots import described
from perdure.state.value_forms import class_named
from perdure.state.walk import Walk
from perdure.store.format import escape
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import Container

_first: WeakKeyDictionary[type, dict[str, Any] | None] = WeakKeyDictionary()
"""The marks of the values of each class when a state that had it was first given to a manager; None for
a class that appeared later, whose first values are unknown."""


class _ClassIndex(msgspec.Struct, frozen=True):
    """The leaf `process/<n>/classes_index`, which describes the leaves `process/<n>/classes`."""

    keys: dict[str, tuple[str, str]]
    """By the path of a value, its class and its name there."""
    containers: dict[str, Container]


_decoder = msgspec.json.Decoder(_ClassIndex)


class ClassValues(ExtraMember):
    """Stores class attributes that the run has changed; refuses sharded tensors and missing classes."""

    def __init__(self) -> None:
        self._has_seen = False
        self._met: set[type] = set()
        """Classes of which any state had objects: the state of a save may have none."""

    def observe(self, walk: Walk) -> None:
        if self._has_seen:  # what comes later, the run has brought in
            return
        self._has_seen = True
        self._met.update(_classes(walk))
        for base in self._met:
            if base not in _first:
                _first[base] = {name: mark_of(value) for name, value in _values(base)}

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        if not self._has_seen:
            self.observe(saving.walk)
        leaves, top = Leaves(), f"process/{saving.process}/classes"
        keys: dict[str, tuple[str, str]] = {}
        self._met.update(_classes(saving.walk))
        for base in sorted(self._met, key=_name_of):
            first = _first.setdefault(base, None)
            for name, value in _values(base):
                mark = None if first is None else first.get(name)
                if mark is None or mark != mark_of(value, is_fresh=False):
                    path = join_part(join_part(top, escape(_name_of(base))), escape(name))
                    found, _ = described(stored_form(value), path)
                    if any(leaf.shards is not None for leaf in found.values()):
                        raise UnsupportedLeafError(
                            f"{_name_of(base)}.{name}: expected whole values in a class, found a "
                            f"sharded tensor. Keep it in an attribute of an object of the state."
                        )
                    leaves.update(found)
                    leaves.containers.update(found.containers)
                    keys[path] = _name_of(base), name
        if not keys:
            return {}
        copies = {path: leaf if leaf.frozen else leaf.copy() for path, leaf in leaves.items()}
        return {**copies, f"{top}_index": json_leaf(_ClassIndex(keys, leaves.containers))}

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        if (stored := restoring.stored("classes_index", _decoder)) is None:
            return []
        states = ObjectStates(Leaves(restoring.leaves, stored.containers))
        bases = {_name_of(base): base for base in _classes(walk)}
        for path, (owner, name) in stored.keys.items():
            base = bases.get(owner) or class_named(owner)
            if base is None and not bases and "<locals>" in owner:
                continue  # a restore without a target only reads, and cannot find this class
            if base is None or not is_user_class(base):
                raise StateError(
                    f"{restoring.where}: the run has changed {name} in the class {owner}, which the "
                    f"program does not have. The rest of the state is restored. Resume with the code "
                    f"that saved it."
                )
            self._met.add(base)
            present = vars(base).get(name)
            setattr(base, name, put_value(present, states.value(path, present)))
            if (first := _first.get(base)) is not None:
                first.pop(name, None)  # every later save stores it again
        return []


def _name_of(base: type) -> str:
    return f"{base.__module__}.{base.__qualname__}"


def _classes(walk: Walk) -> list[type]:
    """The classes of the program's objects in a state, with their bases, by name."""
    kinds = walk.kinds | {type(node.target) for node in walk.objects.values()}
    for _, module in walk.torch_objects("nn.Module"):
        kinds.update(map(type, module.modules()))
    owners = [each.value for each in walk.user_objects() if is_user_class(type(each.value))]
    owners += [node.target for node in walk.objects.values()]
    held = (part for owner in owners for part in getattr(owner, "__dict__", {}).values())
    kinds.update(part for part in held if isinstance(part, type))  # `self.config = Config`
    found = {base for kind in kinds for base in _bases(kind)}
    inside = (part for base in found for part in vars(base).values() if isinstance(part, type))
    return sorted(found.union(*map(_bases, [*inside])), key=_name_of)


@cache
def _bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if is_user_class(base)]


def _values(base: type) -> Iterator[tuple[str, Any]]:
    """The names and values of the attributes of a class that are no code. A run may add attributes."""
    for name in _names(base, len(vars(base))):
        if name in vars(base):
            yield name, vars(base)[name]


@cache
def _names(base: type, _size: int) -> list[str]:
    values = ((name, value) for name, value in vars(base).items() if not name.startswith("__"))
    return [name for name, value in values if not callable(value) and _is_value(value)]


def _is_value(value: Any) -> bool:
    if type(value) in CONTAINERS:
        return all(map(_is_value, value.values() if isinstance(value, dict) else value))
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_array or kind_of(value) in (ValueKind.PLAIN, ValueKind.ARRAY, ValueKind.GENERATOR)
