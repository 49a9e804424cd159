"""Finds a program that does not use what a restore returned, and saves what it gave to the restore.

A restore changes objects in place, and returns new containers, numbers and arrays. A program that
continues with those of the target begins again from its fresh values, without any error.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

from perdure.errors import StateError
from perdure.state.adapter import Stateful, leaf_of
from perdure.state.attribute_values import mark_of
from perdure.state.held import held_values, program_frames
from perdure.state.leaf_values import SCALARS, same_bits
from perdure.state.paths import is_below
from perdure.state.per_rank import own_shards_only
from perdure.state.walk import Branch, Walk

_LOOKS = 3
"""So many saves after a restore are compared: what a program changes, it changes in each step."""


class _Tensor(NamedTuple):
    """A PyTorch tensor in whose place a restore returned another one, with the version of each."""

    old: weakref.ref[Any]
    old_version: int
    new: weakref.ref[Any]
    new_version: int


class ReplacedMembers:
    """The members of a target in whose place a restore returned others, until these are used.

    It keeps both alive, so `forget` is called as soon as the program takes the returned state.
    """

    def __init__(self) -> None:
        self._new: dict[str, Any] = {}
        self._numbers: set[str] = set()
        # By the `id` of a member, which is kept alive so that nothing else gets the same.
        self._old: dict[int, tuple[str, Any]] = {}
        # By the `id` of the returned tensor: PyTorch code changes tensors in place.
        self._tensors: dict[int, _Tensor] = {}
        # By the `id` of a dict or a list, which is not kept alive, its path and its keys.
        self._containers: dict[int, tuple[str, list[Any]]] = {}
        self._marks: dict[str, Any] = {}
        self._looks = 0

    def add_leaf(self, path: str, old: Any, new: Any) -> None:
        """`new` was returned in place of the number or array `old`."""
        if type(old) in SCALARS:
            if type(old) is type(new) and _same(old, new):
                return
            self._numbers.add(path)
        else:
            self._old[id(old)] = path, old
            versions = _version(old), _version(new)
            if None not in versions:
                before, after = versions
                self._tensors[id(new)] = _Tensor(weakref.ref(old), before, weakref.ref(new), after)
        self._new[path] = new

    def add_container(self, path: str, old: Any) -> None:
        """A new container was returned in place of `old`."""
        if not isinstance(old, tuple):  # the program may use an equal constant elsewhere
            self._old[id(old)] = path, old
        if type(old) in (dict, list):
            self._containers[id(old)] = path, list(old) if type(old) is dict else [len(old)]

    def drop(self, path: str) -> None:
        """The value at `path` was changed in place, so that the program has its new members."""
        for inside in [inside for inside in self._new if is_below(inside, [path]) or not path]:
            del self._new[inside]

    def forget(self) -> None:
        """The program has taken the returned state. Tensors and containers are watched further."""
        self._new.clear()
        self._numbers.clear()
        self._old.clear()

    def clear(self) -> None:
        """There is no returned state."""
        self.forget()
        self._tensors.clear()
        self._containers.clear()

    def check_unused(self, walk: Walk, step: int) -> None:
        """Raise `StateError` if the state that is saved as `step` has a member of the target.

        Left alone are numbers that did not change in the restore, arrays that are equal now, and an
        integer that is the step itself, which the program has set.
        """
        with own_shards_only():
            if self._new:
                self._check(walk, walk.root, None, step)
            if self._tensors:
                self._check_tensors(walk)

    def changed_elsewhere(self, walk: Walk) -> str | None:
        """A warning about a dict or a list that the program has given to the restore, still has under
        another name (`ema.shadow`), and changes, while it saves the restored one."""
        if not self._containers or self._looks == _LOOKS:
            return None
        self._looks += 1
        before, self._marks = self._marks, {}
        saved = {id(branch.value) for branch in walk.branches}
        for name, held in held_values(program_frames(sys._getframe()), unnamed=False).items():
            value = held.get()
            if not (path := self._path_of(value)) or id(value) in saved:
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            now = {key: mark_of(item) for key, item in items if id(item) not in saved}
            self._marks[name] = now
            if name in before and before[name] != now:
                self._looks = _LOOKS
                return (
                    f"{path}: the program has changed {name}, which it gave to the restore, and saves "
                    f"the restored one, so that every later checkpoint would have the restored value "
                    f"again. Continue with what the restore returned (`ema.shadow = state['ema']`), or "
                    f"make the object that has it a member of the state."
                )
        return None

    def _path_of(self, value: Any) -> str:
        """The path of a value in the target, if it is one of its containers."""
        path, keys = self._containers.get(id(value), ("", []))
        is_same = type(value) is dict and list(value) == keys
        return path if is_same or (type(value) is list and [len(value)] == keys) else ""

    def _check(self, walk: Walk, part: int | Branch, target_path: str | None, step: int) -> None:
        """`target_path` is the path in the target of a value that lies in a container of it."""
        if isinstance(part, int):
            path, value = walk.paths[part], walk.values[part]
            target_path, _ = self._old.get(id(value), (target_path, None))
            if target_path in self._new and not self._is_fine(value, target_path, step):
                raise StateError(
                    f"{path or '(the state itself)'}: the restore returned a new value here, which "
                    f"this program does not use: it saves what it gave to the restore, so that it has "
                    f"begun again from the fresh value. Continue with the state that the restore "
                    f"returns: `state, step = manager.restore_or_initialize(state)`."
                )
            return
        target_path, _ = self._old.get(id(part.value), (target_path, None))
        if isinstance(part.node, Stateful):
            return
        for child in part.parts:
            inside = walk.paths[child] if isinstance(child, int) else child.path
            last = inside[len(part.path) :].removeprefix("/")
            above = f"{target_path}/" if target_path and last else target_path
            self._check(walk, child, None if above is None else above + last, step)

    def _is_fine(self, value: Any, target_path: str, step: int) -> bool:
        """Whether the program has given a leaf of its target the value that it should have.

        A counter that began again may have reached the restored number once more. A constant array is
        equal, and nothing is lost.
        """
        if target_path in self._numbers:
            return type(value) is int and value == step
        return _same(value, self._new[target_path])

    def _check_tensors(self, walk: Walk) -> None:
        for path, new in walk.pairs():
            if (tensor := self._tensors.get(id(new))) is None or tensor.new() is not new:
                continue
            old = tensor.old()
            if old is None or _version(new) != tensor.new_version:
                del self._tensors[id(new)]
            elif _version(old) != tensor.old_version and not _same(old, new):
                raise StateError(
                    f"{path or '(the state itself)'}: the restore returned a new tensor here, and the "
                    f"program has changed the tensor that it gave to the restore instead, so that "
                    f"every save would store the restored value again. Use the tensors of the state "
                    f"that the restore returns, or save the module that owns them: modules and "
                    f"parameters are restored in place."
                )


def _version(value: Any) -> Any:
    """The number of changes of a PyTorch tensor; None for any other value."""
    try:
        return getattr(value, "_version", None)
    except RuntimeError:  # of an inference tensor
        return None


def _same(one: Any, other: Any) -> bool:
    first, second = leaf_of(one), leaf_of(other)
    return first is not None and second is not None and same_bits(first, second)
