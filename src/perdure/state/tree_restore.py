"""Restores a target from the leaves of a checkpoint.

Invariant: nothing is changed before the whole target has been compared with the checkpoint and every
new value has been built. Then either all objects are changed, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, load_leaf
from perdure.state.containers import array_template
from perdure.state.leaf_errors import PathInErrors, add_path, type_name
from perdure.state.leaf_spec import Difference, format_differences, mismatch_error
from perdure.state.leaf_values import is_plain, same_bits
from perdure.state.object_restore import ObjectStates
from perdure.state.paths import join_part
from perdure.state.replaced_members import ReplacedMembers
from perdure.state.restore_advice import advice, ways_out
from perdure.state.restore_plan import RestorePlan, StoredState, plan_restore
from perdure.state.restore_report import RestoreReport
from perdure.state.restore_request import RestoreRequest
from perdure.state.stateful import Stateful
from perdure.state.template import differences, template_of_walk
from perdure.state.tree_flatten import unflatten
from perdure.state.walk import Branch, Described, Walk
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf
from perdure.store.manifest import Arrays


def restore(like: Any, leaves: Mapping[str, Leaf]) -> Any:
    """A state with the structure of `like` and the bits of `leaves`.

    Containers and arrays are new. Modules, optimizers, parameters and other objects are changed in
    place. An object with `load_state_dict` is given the state that was stored, whatever its present
    one looks like, and has to return the same bits afterwards.

    Args:
        like: the target. It decides structure, array class, device and sharding; its values are not
            read.
        leaves: the leaves of a checkpoint by path.

    Raises:
        MismatchError: target and checkpoint differ in structure, dtype or shape; the message lists the
            differences by leaf path. Or an object returned another state than it was given.
        StateError: an object did not take its state; the message starts with its path.

    After an error the target is what it was before, unless the message names an object whose earlier
    state could not be loaded again.
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
    """`restore` of what `request` asks for; everything else in `like` stays the very same.

    Args:
        like: the target.
        leaves: the leaves of the checkpoint that the request wants, by their paths there.
        request: what to restore, and how.
        stored: everything that the checkpoint has.
        takes: whether restored values may be in the memory of `leaves`, which the caller has just
            loaded and does not use afterwards.
        replaced: is given the members of `like` that are not in the returned state.
        shared: by path, the number of an object that is at several paths.

    Returns:
        The state, and how it differs from the checkpoint.

    Raises:
        MismatchError, StateError: as `restore`; a pattern or a rename fits nothing.
    """
    with gc_paused(len(leaves)):
        refusals: dict[str, str] = {}
        replaced = replaced or ReplacedMembers()
        while True:
            plan = plan_restore(like, leaves, request, stored, refusals)
            if plan.differences:
                hints = ways_out(like, leaves, request, stored, plan)
                raise mismatch_error(plan.differences, advice(plan.differences) + hints)
            attempt = _Restore(plan, takes, replaced, shared)
            try:
                return attempt.run(), plan.report
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
    """Nested dicts of NumPy arrays and Python scalars; arguments and errors as `restore_requested`."""
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
        if isinstance(self.node, Node):
            with PathInErrors(self.path, "its value could not be set"):
                self.node.rebuild(self.new)
            return
        name = type_name(self.node.target)
        with PathInErrors(self.path, f"a {name} did not take the state that was stored"):
            self.node.load(self.new)


class _Backup(NamedTuple):
    """The state of an object before its change."""

    path: str
    node: Stateful
    digests: dict[str, list[str]] | None
    undo: Callable[[], object]


class _Restore:
    """One restore: builds all new values, then changes the objects of the target in place."""

    def __init__(
        self,
        plan: RestorePlan,
        takes: bool,
        replaced: ReplacedMembers,
        shared: Mapping[str, int],
    ) -> None:
        self._shared = shared
        self._built: dict[int, Any] = {}  # by the number of a shared object
        self._replaced = replaced
        self._misfits: list[Difference] = []
        self._refused: tuple[str, Stateful] | None = None
        self._walk, self._leaves, self._specs = plan.walk, plan.leaves, plan.specs
        self._keep, self._keep_branches = plan.keep, plan.keep_branches
        self._keeps_some = bool(plan.keep or plan.keep_branches)
        self._adapters = loaded_adapters()
        self._objects = ObjectStates(
            plan.leaves, self._build_inside_object, plan.keep, takes, plan.sharded
        )
        self._changes: list[_Change] = []

    def run(self) -> Any:
        restored = self._build(self._walk, self._walk.root)
        if lines := self._objects.missing + self._misfits + self._conflicts():
            raise mismatch_error(lines, advice(lines))
        self._apply_changes()
        return restored

    def refused_by_another(self) -> str | None:
        """The path of the object that did not take its state, if all objects have the earlier one.

        None for an object whose state has the paths of the stored one: it should have taken it.
        """
        if self._refused is None:
            return None
        path, node = self._refused
        present = self._objects.digests(node, path)
        is_alike = present is None or present.keys() == set(self._objects.leaf_paths(path))
        return None if is_alike else path

    def _build(self, walk: Walk, part: int | Branch) -> Any:
        """The new value for a part of a walk; a change in place is added to `_changes`."""
        if not self._shared:
            return self._build_one(walk, part)
        path = walk.paths[part] if isinstance(part, int) else part.path
        number = self._shared.get(path, -1)
        if number not in self._built or path in self._keep:
            value = self._build_one(walk, part)
            if number >= 0 and value is not None:
                self._built[number] = value
            return value
        value = self._built[number]
        like = walk.values[part] if isinstance(part, int) else part.value
        return value if type(value) is type(like) else self._build_one(walk, part)

    def _build_one(self, walk: Walk, part: int | Branch) -> Any:
        if isinstance(part, int):
            like, path = walk.values[part], walk.paths[part]
            taker = walk.takers[type(like)]
            assert taker is not None
            try:
                return self._build_leaf(taker, like, path)
            except StateError as error:
                add_path(error, path)
                raise
        path, like, node = part.path, part.value, part.node
        if node is None or path in self._keep_branches:
            return like
        if isinstance(node, Described):
            return like if path in self._keep else self._objects.value(path, like)
        if isinstance(node, Stateful):
            if path not in self._keep:
                self._changes.append(_Change(path, node, self._state(node, path)))
            return node.target
        children = [self._build(walk, child) for child in part.parts]
        if self._keeps_some and _are_same(children, node):
            return like
        if node.in_place:
            self._replaced.drop(path)
            self._changes.append(_Change(path, node, children))
            return like
        self._replaced.add_container(path, like)
        with PathInErrors(path, f"a {type_name(like)} could not be rebuilt from its parts"):
            return node.rebuild(children)

    def _build_leaf(self, taker: Adapter, like: Any, path: str) -> Any:
        """`_build` of a leaf, which `taker` takes."""
        if path in self._keep:
            return like
        containers = self._objects.containers
        if (
            containers
            and (like is None or is_plain(like))
            and (entry := containers.get(path)) is not None
        ):
            value, variable = self._load_as(entry.arrays, like, path), None
        else:
            value = load_leaf(taker, like, self._leaves[path])
            variable = taker.variable(like)
        if variable is None:
            self._replaced.add_leaf(path, like, value)
            return value
        self._changes.append(_Change(path, variable, value))
        return like

    def _state(self, node: Stateful, path: str) -> Any:
        """The state to load into the object at `path`."""
        try:
            state = self._objects.state(node, path)
        except StateError:
            self._refused = path, node
            raise
        self._misfits += [
            line._replace(path=join_part(path, line.path)) for line in node.misfits(state)
        ]
        return state

    def _build_inside_object(self, like: Any, path: str) -> Any:
        """The new value for a live object inside the state of another object.

        It is compared with the checkpoint as strictly as outside of objects.
        """
        leaves = {
            leaf_path: self._leaves[leaf_path] for leaf_path in self._objects.leaf_paths(path)
        }
        walk = Walk(like, self._specs, path)
        if lines := differences(template_of_walk(walk), leaves):
            raise mismatch_error(lines, advice(lines))
        return self._build(walk, walk.root)

    def _load_as(self, array_class: Arrays | None, like: Any, path: str) -> Any:
        """The leaf at `path`, for which the target has a NumPy array or a number, and the run that
        saved it had an array of `array_class`.

        The next operation then has the same bits as in the uninterrupted run. The array is of NumPy if
        this process has not imported the framework, or the framework cannot hold the dtype (JAX
        without x64).
        """
        leaf = self._leaves[path]
        if (
            array_class is not None
            and array_class.partition("@")[0].partition(".")[0] in sys.modules
        ):
            target = array_template(array_class, leaf, like)
            with suppress(UnsupportedLeafError):
                if (adapter := leaf_adapter(target, self._adapters)) is not None:
                    return load_leaf(adapter[0], target, leaf)
        adapter = leaf_adapter(like, self._adapters)
        assert adapter is not None
        return load_leaf(adapter[0], like, leaf)

    def _conflicts(self) -> list[Difference]:
        """Objects that the target has twice, and for which the checkpoint has two different states."""
        first_paths: dict[int, str] = {}
        conflicts = []
        for change in self._changes:
            if isinstance(change.node, Stateful):
                first = first_paths.setdefault(id(change.node.target), change.path)
                if first != change.path and not self._same_leaves(first, change.path):
                    reason = f"is one object with {first} in the target, the checkpoint has two"
                    conflicts.append(Difference(change.path, reason=reason))
        return conflicts

    def _same_leaves(self, first: str, second: str) -> bool:
        """Whether the checkpoint has the same leaves below two paths."""
        one, other = (
            {
                leaf_path[len(path) :]: self._leaves[leaf_path]
                for leaf_path in self._objects.leaf_paths(path)
            }
            for path in (first, second)
        )
        return one.keys() == other.keys() and all(same_bits(one[p], other[p]) for p in one)

    def _apply_changes(self) -> None:
        """Change the objects in place: all of them, or none.

        Objects whose load may fail come first, each after a backup of its state. The others (modules,
        generators) cannot fail, so that no copy of a model is needed.
        """
        fallible: list[_Change] = []
        safe: list[_Change] = []
        for change in self._changes:
            node = change.node
            has_backup = isinstance(node, Stateful) and (node.can_fail or node.comes_first)
            (fallible if has_backup else safe).append(change)
        fallible.sort(key=lambda change: not getattr(change.node, "comes_first", False))
        backups: list[_Backup] = []
        begun: list[str] = []
        refused: _Change | None = None
        try:
            for change in fallible:
                backups.append(self._back_up(change))
                refused = change
                change.apply()
                refused = None
            for change in fallible:
                refused = change
                self._compare([change])
            refused = None
            for change in safe:
                begun.append(change.path)
                change.apply()
            self._compare(safe)
        except BaseException as error:
            mixed = begun + self._undo(backups)
            if refused is not None and isinstance(refused.node, Stateful) and not mixed:
                self._refused = refused.path, refused.node
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

    def _back_up(self, change: _Change) -> _Backup:
        assert isinstance(change.node, Stateful)
        with PathInErrors(change.path, "a copy of its present state could not be made"):
            digests = self._objects.digests(change.node, change.path)
            return _Backup(change.path, change.node, digests, change.node.backup())

    def _undo(self, backups: Sequence[_Backup]) -> list[str]:
        """Load the earlier states. Returns the paths of the objects that did not take theirs."""
        failed = []
        for backup in reversed(backups):
            try:
                backup.undo()
                if self._objects.digests(backup.node, backup.path) != backup.digests:
                    failed.append(backup.path)
            except BaseException:  # noqa: BLE001 - the first error is raised, and names this path
                failed.append(backup.path)
        return failed

    def _compare(self, changes: Sequence[_Change]) -> None:
        """Raise `MismatchError` if an object does not return the state that it was given."""
        for change in changes:
            if not isinstance(change.node, Stateful):
                continue
            if lines := self._objects.differences(change.node, change.path):
                name = type_name(change.node.target)
                raise MismatchError(
                    f"{change.path}: a {name} took the state that was stored, and returns another "
                    f"one:\n{format_differences(lines)}\n"
                    f"`state_dict` has to return what `load_state_dict` was given."
                )


def _are_same(children: Sequence[Any], node: Node) -> bool:
    return all(new is old for new, (_, old) in zip(children, node.children, strict=True))
