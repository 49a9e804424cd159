"""Restores a target from the leaves of a checkpoint.

Invariant: nothing is changed before the whole target has been compared with the checkpoint and every
new value has been built. Then either all objects are changed, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Node, Stateful, load_leaf
from perdure.state.builtin import attributes_in_place, is_frozen
from perdure.state.leaf_spec import (
    Difference,
    PathInErrors,
    add_path,
    format_differences,
    mismatch_error,
    type_name,
)
from perdure.state.leaf_values import is_plain, same_bits
from perdure.state.object_restore import ObjectStates
from perdure.state.program_code import is_user_class
from perdure.state.restore_check import ReplacedMembers
from perdure.state.restore_plan import RestorePlan, StoredState
from perdure.state.restore_request import RestoreReport, RestoreRequest
from perdure.state.snapshots import unflatten
from perdure.state.value_forms import class_named
from perdure.state.walk import Branch, RebuiltTarget, Walk, differences, template_of
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf

_WAYS_OUT = (
    " `CheckpointManager.restore` has ways out: `cast=True` converts dtypes, `rename={old: new}` moves "
    "leaves, `leaves=[...]` restores a part, and `strict=False` what fits, which is no exact resume."
)


def restore(like: Any, leaves: Mapping[str, Leaf]) -> Any:
    """A state with the structure of `like` and the bits of `leaves`.

    Containers and arrays are new; modules, optimizers, parameters and other objects are changed in
    place, and have to return the bits that they were given. Raises `MismatchError` with the
    differences by path, or `StateError` for an object that did not take its state; the target is
    then what it was before, unless the message names an object whose earlier state could not be
    loaded again.
    """
    with gc_paused(len(leaves)):
        return restore_requested(like, leaves, RestoreRequest(), StoredState.of(leaves))[0]


def restore_requested(
    like: Any,
    leaves: Mapping[str, Leaf],
    request: RestoreRequest,
    stored: StoredState,
    *,
    takes: bool = False,
    replaced: ReplacedMembers | None = None,
    shared: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Any, RestoreReport]:
    """`restore` of what `request` asks for; the rest of `like` stays. Returns the state and a
    report.

    `stored` is all that the checkpoint has, `leaves` what is wanted of it, whose memory values may
    use with `takes`. `replaced` gets the members that are not in the returned state; `shared`
    numbers objects that are at several paths.
    """
    with gc_paused(len(leaves)):
        refusals: dict[str, str] = {}
        replaced = replaced or ReplacedMembers()
        while True:
            plan = RestorePlan(like, leaves, request, stored, refusals)
            if lines := plan.differences:
                has_ways = request.strict and not all(line.reason for line in lines)
                raise mismatch_error(lines, _WAYS_OUT if has_ways else "")
            attempt = _Restore(plan, takes, replaced, shared)
            try:
                return attempt.run(), plan.report()
            except StateError as error:
                path = attempt.refused_by_another()
                if request.strict or path is None or path in refusals:
                    raise
                # An object of another class, which has its earlier state again: kept as a whole.
                why = str(error).removeprefix(f"{path}: ")
                if (cause := error.__cause__) is not None:
                    why = f"{type(cause).__name__}: {cause}"
                first_line = why.partition("\n")[0].rstrip(":")
                refusals[path] = f"cannot take the state that was stored: {first_line}"
                replaced.clear()


def restore_without_target(
    leaves: Mapping[str, Leaf], request: RestoreRequest, stored: StoredState
) -> tuple[Any, RestoreReport]:
    """Nested dicts of NumPy arrays and Python scalars; as `restore_requested`."""
    renaming, selection = request.renaming, request.selection
    renaming.check(stored.specs, stored.containers)
    if selection is not None and (unused := selection.unused(renaming.rename(stored.specs))):
        raise MismatchError(f"{unused[0]}: the checkpoint has no such leaf or branch.")
    renamed = tuple(sorted(renaming(path) for path in leaves if renaming(path) != path))
    patterns = () if selection is None else selection.patterns
    return unflatten(renaming.rename(leaves)), RestoreReport(renamed=renamed, leaves=patterns)


class _Change(NamedTuple):
    """A change in place: the new state of an object, or the new children of a node."""

    path: str
    node: Node | Stateful
    new: Any

    def apply(self) -> None:
        node = self.node
        if isinstance(node, Node):
            with PathInErrors(self.path, "its value could not be set"):
                node.rebuild(self.new)
            return
        name = type_name(node.target)
        with PathInErrors(self.path, f"a {name} did not take the state that was stored"):
            node.load(self.new)

    @property
    def order(self) -> int:
        """0: others may need this change. 1: it may fail. Both have a backup. 2: it cannot fail."""
        node = self.node
        if isinstance(node, Node):
            return 2 if node.undo is None else 0
        return 0 if node.comes_first else 1 if node.can_fail else 2


class _Restore(ObjectStates):
    """One restore: builds all new values, then changes the objects of the target in place."""

    def __init__(
        self,
        plan: RestorePlan,
        takes: bool,
        replaced: ReplacedMembers,
        shared: Mapping[str, int],
    ) -> None:
        super().__init__(plan.leaves, plan.keep, takes, plan.sharded)
        self._plan = plan
        described = {p for p, node in plan.walk.objects.items() if isinstance(node, RebuiltTarget)}
        others = plan.walk.objects.keys() - described
        # In a restore of parts, what stays is not what the checkpoint has.
        self._numbers = {p: n for p, n in shared.items() if p not in others and not plan.keep}
        self._built: dict[int, Any] = {}  # by the number of a shared object
        self._building: set[int] = set()
        self._first: dict[int, int | Branch] = {}  # where the target has one
        if self._numbers:
            parts: list[tuple[str, int | Branch]] = [(b.path, b) for b in plan.walk.branches]
            parts += [(p, number) for number, p in enumerate(plan.walk.paths)]
            for p, part in parts:
                if p in self._numbers:
                    self._first.setdefault(self._numbers[p], part)
        self._replaced = replaced
        self._refused: tuple[str, Stateful] | None = None
        self._changes: list[_Change] = []
        self._taken = {id(b.value) for b in plan.walk.branches if isinstance(b.node, Node)}
        """The objects that are restored at a path of their own."""
        self._is_described = False
        """Whether a value is built that is no part of the state of an object."""

    def run(self) -> Any:
        walk = self._plan.walk
        restored = self._build(walk, walk.root)
        if lines := self.missing + self._conflicts():
            raise mismatch_error(lines)
        self._apply_changes()
        return restored

    def refused_by_another(self) -> str | None:
        """The path of the object that did not take its state, if all have the earlier one; None if
        its state has the paths of the stored one, so that it should have taken it."""
        if self._refused is None:
            return None
        path, node = self._refused
        present = self.digests(node, path)
        is_alike = present is None or present.keys() == set(self.leaf_paths(path))
        return None if is_alike else path

    def _build(self, walk: Walk, part: int | Branch) -> Any:
        """The new value for a part of a walk; a change in place is added to `_changes`."""
        is_leaf = isinstance(part, int)
        path = walk.paths[part] if isinstance(part, int) else part.path
        if path not in self._numbers:
            return self._build_one(walk, part)
        like = walk.values[part] if isinstance(part, int) else part.value
        value = self.shared(path, lambda: self._build_one(walk, part))
        may_change = (
            (like is None or is_plain(like)) if is_leaf else isinstance(part.node, RebuiltTarget)
        )
        return value if may_change or type(value) is type(like) else self._build_one(walk, part)

    def shared(self, path: str, build: Callable[[], Any]) -> Any:
        """What `build` makes, or the object at `path` that is at other paths too. It is built once, if
        possible where the target has a value, which says the devices of arrays."""
        number = self._numbers.get(path)
        if number is None or number in self._building:  # a part of it may have the same path
            return build()
        if number not in self._built:
            walk, first = self._plan.walk, self._first.get(number)
            self._building.add(number)
            self._built[number] = build() if first is None else self._build_one(walk, first)
            self._building.remove(number)
        return self._built[number]

    def _build_one(self, walk: Walk, part: int | Branch) -> Any:
        if isinstance(part, int):
            path = walk.paths[part]
            try:
                return self._build_leaf(walk, walk.values[part], path)
            except StateError as error:
                add_path(error, path)
                raise
        path, like, node = part.path, part.value, part.node
        if node is None or path in self.keep:
            return like
        if isinstance(node, RebuiltTarget):
            outer, self._is_described = self._is_described, True
            value = self.value(path, like)
            self._is_described = outer
            return value
        if isinstance(node, Stateful):
            self._changes.append(_Change(path, node, self.state(node, path)))
            return like
        children = [self._build(walk, child) for child in part.parts]
        if self.keep and all(
            new is old for new, (_, old) in zip(children, node.children, strict=True)
        ):
            return like
        if node.in_place:
            self._replaced.drop(path)
            self._changes.append(_Change(path, node, children))
            return like
        self._replaced.add_container(path, like)
        with PathInErrors(path, f"a {type_name(like)} could not be rebuilt from its parts"):
            made = node.rebuild(children)
        keys = entry.keys if (entry := self.containers.get(path)) is not None else None
        is_ordered = type(made) is dict and keys is not None and made.keys() == set(keys)
        return {key: made[key] for key in keys or ()} if is_ordered else made

    def _build_leaf(self, walk: Walk, like: Any, path: str) -> Any:
        if path in self.keep:
            return like
        taker, variable = walk.takers[type(like)], None
        assert taker is not None
        if path in self.containers and (like is None or is_plain(like)):
            value = self._load_as(self.containers[path].arrays, like, path)
        else:
            value = load_leaf(taker, like, self.leaves[path])
            variable = taker.variable(like)
        if variable is None:
            self._replaced.add_leaf(path, like, value)
            return value
        self._changes.append(_Change(path, variable, value))
        return like

    def state(self, stateful: Stateful, path: str) -> Any:
        try:
            return super().state(stateful, path)
        except StateError:
            self._refused = path, stateful
            raise

    def rebuild(self, like: Any, path: str) -> Any:
        """The new value for a live object inside the state of another one, compared as strictly."""
        walk = Walk(like, self._plan.specs, path)
        if lines := differences(template_of(walk), self._below(path)):
            raise mismatch_error(lines)
        return self._build(walk, walk.root)

    def container_class(self, name: str, like: Any) -> type[Any] | None:
        if not self._is_described:
            return None
        kinds = (type(like), *self._plan.walk.kinds)
        of_target = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
        kind = of_target.get(name) or class_named(name)
        is_one = kind is not None and issubclass(kind, (list, tuple, Mapping))
        is_one = is_one and not hasattr(kind, "_fields")
        return kind if is_one and (name in of_target or is_user_class(kind)) else None

    def record(self, kind: type, values: dict[str, Any], like: Any, path: str) -> Any:
        is_exchanged = type(like) is not kind or is_frozen(kind) or id(like) in self._taken
        if not self._is_described or is_exchanged:
            return super().record(kind, values, like, path)
        self._taken.add(id(like))
        self._replaced.drop(path)
        node = attributes_in_place(like, [*values])
        self._changes.append(_Change(path, node, [*values.values()]))
        return like

    def _below(self, path: str) -> dict[str, Leaf]:
        return {inside: self.leaves[inside] for inside in self.leaf_paths(path)}

    def _load_as(self, array_class: str | None, like: Any, path: str) -> Any:
        """The leaf at `path` as an array of `array_class`, as the run had it where the target has a
        NumPy array or a number, so that the next operation has the same bits. An array of NumPy if
        the framework is not imported, or cannot hold the dtype (JAX without x64)."""
        library = (array_class or "").partition("@")[0].partition(".")[0]
        if array_class is not None and library in sys.modules:
            with suppress(UnsupportedLeafError):
                return self.leaf_as(array_class, path, like)
        return self.load(like, path)

    def _conflicts(self) -> list[Difference]:
        """Objects that the target has twice, and for which the checkpoint has two different states."""
        first_paths: dict[int, str] = {}
        conflicts = []
        for path, node, _ in self._changes:
            if not isinstance(node, Stateful):
                continue
            first = first_paths.setdefault(id(node.target), path)
            if first == path:
                continue
            one, other = (
                {inside[len(each) :]: leaf for inside, leaf in self._below(each).items()}
                for each in (first, path)
            )
            if one.keys() != other.keys() or not all(same_bits(one[p], other[p]) for p in one):
                reason = f"is one object with {first} in the target, the checkpoint has two"
                conflicts.append(Difference(path, reason=reason))
        return conflicts

    def _apply_changes(self) -> None:
        """Change the objects in place: all of them, or none. Changes that may fail come first, each
        after a backup; the others need no copy of a model."""
        groups: tuple[list[_Change], ...] = [], [], []
        for change in self._changes:
            groups[change.order].append(change)
        with_backup, safe = groups[0] + groups[1], groups[2]
        undo: list[tuple[str, Callable[[], bool]]] = []
        begun: list[str] = []
        failing: _Change | None = None
        try:
            for failing in with_backup:
                undo.append((failing.path, self._backup(failing)))
                failing.apply()
            for failing in with_backup:
                self._compare(failing)
            failing = None
            for change in safe:
                begun.append(change.path)
                change.apply()
            for change in safe:
                self._compare(change)
        except BaseException as error:
            mixed = begun + [path for path, is_undone in reversed(undo) if not is_undone()]
            if failing is not None and isinstance(failing.node, Stateful) and not mixed:
                self._refused = failing.path, failing.node
            if isinstance(error, StateError):
                outcome = "Every object has the state that it had before."
                if mixed:
                    outcome = (
                        f"These hold a mixture of old and new values: "
                        f"{', '.join(path or 'the state itself' for path in mixed)}. Restore again "
                        f"before you continue training."
                    )
                error.args = (f"{error} {outcome}",)
            raise

    def _backup(self, change: _Change) -> Callable[[], bool]:
        """Returns what gives an object its present state again, and whether that has succeeded."""
        path, node, _ = change
        if isinstance(node, Node):
            digests, undo = None, node.undo
        else:
            with PathInErrors(path, "a copy of its present state could not be made"):
                digests, undo = self.digests(node, path), node.backup()

        def is_undone() -> bool:
            assert undo is not None
            try:
                undo()
                return isinstance(node, Node) or self.digests(node, path) == digests
            except BaseException:  # noqa: BLE001 - the first error is raised, and names this path
                return False

        return is_undone

    def _compare(self, change: _Change) -> None:
        path, node, _ = change
        if isinstance(node, Stateful) and (lines := self.differences(node, path)):
            raise MismatchError(
                f"{path}: a {type_name(node.target)} took the state that was stored, and returns "
                f"another one:\n{format_differences(lines)}\n"
                f"`state_dict` has to return what `load_state_dict` was given."
            )
