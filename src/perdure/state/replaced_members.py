"""Finds a program that does not use what a restore returned, and saves what it gave to the restore.

A restore changes objects in place, and returns new containers, numbers and arrays. A program that
continues with those of the target begins again from its fresh values, without any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from perdure.errors import StateError
from perdure.state.adapter import loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.leaf_values import SCALARS, same_bits
from perdure.state.paths import is_below, join_key
from perdure.state.replaced_containers import ReplacedContainers
from perdure.state.shards import own_shards_only
from perdure.state.stateful import Stateful
from perdure.store.leaf import Leaf


class ReplacedMembers:
    """The members of a target in whose place a restore returned others, until these are used.

    It keeps both alive, so `forget` is called as soon as the program takes the returned state.
    """

    def __init__(self) -> None:
        self._new: dict[str, Any] = {}
        self._numbers: set[str] = set()
        # By the `id` of a member, which is kept alive so that nothing else gets the same.
        self._old: dict[int, tuple[str, Any]] = {}
        self._containers = ReplacedContainers()

    def add_leaf(self, path: str, old: Any, new: Any) -> None:
        """`new` was returned in place of the number or array `old`."""
        if type(old) in SCALARS:
            if type(old) is type(new) and _same(old, new):
                return
            self._numbers.add(path)
        else:
            self._old[id(old)] = path, old
            self._containers.add_array(path, old)
        self._new[path] = new

    def add_container(
        self, path: str, old: Any, children: Iterable[tuple[str, Any]], members: Sequence[Any]
    ) -> None:
        """A new container with `members` was returned in place of `old`, which had `children`."""
        self._containers.add(path, old, children, members)
        if not isinstance(old, tuple):  # the program may use an equal constant elsewhere
            self._old[id(old)] = path, old

    def drop(self, path: str) -> None:
        """The value at `path` was changed in place, so that the program has its new members."""
        for inside in [inside for inside in self._new if is_below(inside, [path]) or not path]:
            del self._new[inside]

    def forget(self) -> None:
        """The program has taken the returned state. Only containers are watched further."""
        self._new.clear()
        self._numbers.clear()
        self._old.clear()
        self._containers.taken()

    def clear(self) -> None:
        """There is no returned state."""
        self.forget()
        self._containers.clear()

    def check_unused(self, state: Any, step: int) -> None:
        """Raise `StateError` if `state`, which is saved as `step`, has a member of the target.

        Left alone are numbers that did not change in the restore, arrays that are equal now, and an
        integer that is the step itself, which the program has set.
        """
        if self._new:
            with own_shards_only():
                self._visit(state, "", None, step)
        self._containers.check_unused(state)

    def _is_fine(self, value: Any, target_path: str, step: int) -> bool:
        """Whether the program has given a leaf of its target the value that it should have.

        A counter that began again may have reached the restored number once more. A constant array is
        equal, and nothing is lost.
        """
        if target_path in self._numbers:
            return type(value) is int and value == step
        return _same(value, self._new[target_path])

    def _visit(self, value: Any, path: str, target_path: str | None, step: int) -> None:
        """`target_path` is the path in the target of a value that lies in a container of it."""
        target_path, _ = self._old.get(id(value), (target_path, None))
        adapters = loaded_adapters()
        if leaf_adapter(value, adapters) is not None:
            if target_path in self._new and not self._is_fine(value, target_path, step):
                raise StateError(
                    f"{path or '(the state itself)'}: the restore returned a new value here, which "
                    f"this program does not use: it saves what it gave to the restore, so that it has "
                    f"begun again from the fresh value. Continue with the state that the restore "
                    f"returns: `state, step = manager.restore_or_initialize(state)`."
                )
            return
        node = node_of(value, path, adapters, None)
        if isinstance(node, Stateful):
            return
        for key, child in node.children:
            child_path = None if target_path is None else join_key(target_path, key)
            self._visit(child, join_key(path, key), child_path, step)


def _same(one: Any, other: Any) -> bool:
    try:
        first, second = _leaf(one), _leaf(other)
    except StateError:  # PyTorch has seen that the program changes the old tensor
        return False
    return first is not None and second is not None and same_bits(first, second)


def _leaf(value: Any) -> Leaf | None:
    taken = leaf_adapter(value, loaded_adapters())
    return None if taken is None else taken[0].leaf(value)
