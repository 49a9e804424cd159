"""A state as `{leaf path: Leaf}`, and back into a template.

Invariant of `restore`: nothing is changed before the whole template has been compared with the
checkpoint and every new value has been built; then either all objects are changed or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Difference, Node, Spec, Stateful
from perdure.state.builtin import is_plain, plain_value
from perdure.state.containers import array_class, array_template
from perdure.state.objects import Collector, Stored, same, two_leaves
from perdure.state.per_rank import here, placed
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.state.template import differences, listed, mismatch, template_of
from perdure.state.walk import (
    Named,
    adapters,
    join,
    leaf_adapter,
    load_leaf,
    name_error,
    nested_too_deeply,
    node_of,
    type_name,
)
from perdure.store.format import unescape
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import Arrays, Container

_REBUILD = "Build the target with the code that saved it, or restore without a target."


def flatten(state: Any, plain: Collection[str] = ()) -> Leaves:
    """Every leaf of `state` by its path, sharing memory with the live arrays where it can.

    Paths join dict keys, field names and positions with `/`: `model/dense/kernel`. `plain` has the
    paths at which the target of the program has NumPy arrays and numbers; if an array of a framework
    lies there now, its class is recorded in `containers`. Raises `UnsupportedLeafError` naming the path
    of a value that has no exact form.
    """
    leaves = Leaves()
    try:
        _collect([("", state)], "", adapters(), leaves, plain)
    except RecursionError:
        raise nested_too_deeply() from None
    return leaves


def snapshot(state: Any, into: SnapshotBuffer | None = None, plain: Collection[str] = ()) -> Leaves:
    """`flatten`, safe to use after `state` changes: whatever can change in place is copied.

    The copies lie in `into`, where they stay until the next snapshot into it, or in new memory.
    """
    with gc_paused():
        return (into or SnapshotBuffer()).hold(flatten(state, plain))


def restore(like: Any, leaves: Mapping[str, Leaf]) -> Any:
    """`like` with the bits of `leaves`: new containers and arrays, in place for modules, optimizers and
    parameters.

    `like` gives structure, array kind, device and sharding; its values are not read. An object with
    `load_state_dict` is given the state that was stored, whatever its present one looks like, and has
    to return the same bits afterwards.

    Raises `MismatchError` that lists the differences in structure, dtype and shape by leaf path, and
    `StateError` with the path of an object that did not take its state. The target is what it was
    before then, unless the message names an object that it could not put back.
    """
    specs = {path: Spec.of(leaf) for path, leaf in leaves.items()}
    with placed(here().index, here().count) as place:
        template = template_of(like, specs)
    # Of a `PerRank` member, the leaves of other processes are not for this one.
    own = {path: leaf for path, leaf in leaves.items() if not place.leaves_out(path)}
    if lines := differences(template, own):
        raise mismatch(lines, _advice(lines))
    changes: list[_Change] = []
    among = adapters()
    containers = containers_of(leaves)

    def build(like: Any, path: str) -> Any:
        with Named(path):
            if (leaf := leaf_adapter(like, among)) is not None:
                if is_plain(like) and (entry := containers.get(path)) is not None:
                    return _of_class(entry.arrays, like, leaves[path], among)
                value = load_leaf(leaf[0], like, leaves[path])
                if (variable := leaf[0].variable(like)) is None:
                    return value
                changes.append(_Change(path, variable, value))
                return like
            node = node_of(like, path, among, specs)
        if isinstance(node, Stateful):
            changes.append(_Change(path, node, stored.state(node, path)))
            return node.target
        children = [build(child, join(path, key)) for key, child in node.children]
        if node.in_place:
            changes.append(_Change(path, node, children))
            return like
        with Named(path), _Wrapped(f"a {type_name(like)} could not be rebuilt from its parts"):
            return node.rebuild(children)

    def build_inside(like: Any, path: str) -> Any:
        """A live value in the state of an object: strict, as outside of objects."""
        part = {f"{path}{at}": leaf for at, leaf in _below(leaves, path).items()}
        if lines := differences(template_of(like, specs, path), part):
            raise mismatch(lines, _advice(lines))
        return build(like, path)

    stored = Stored(leaves, build_inside)
    restored = build(like, "")
    if lines := stored.missing + _conflicts(changes, leaves):
        raise mismatch(lines, _REBUILD)
    _apply(changes, stored)
    return restored


def _of_class(name: Arrays | None, like: Any, leaf: Leaf, among: Sequence[Adapter]) -> Any:
    """An array where the target has a NumPy array or a number, of the class that the run had there.

    The next operation on it then has the same bits as in the run that went on. It is of NumPy if this
    process has not imported the framework, or if that cannot hold the dtype (JAX without x64).
    """
    if name is not None and name.split(".")[0].split("@")[0] in sys.modules:
        target = array_template(name, leaf, like)
        with suppress(UnsupportedLeafError):
            if (known := leaf_adapter(target, among)) is not None:
                return load_leaf(known[0], target, leaf)
    known = leaf_adapter(like, among)
    assert known is not None
    return load_leaf(known[0], like, leaf)


_DRIFTED = (
    " Where only the dtype of an array differs, the program may have changed it after the target was "
    "made: cast it back in the step, or give the target the dtype that the step returns (in JAX: "
    "`like=jax.eval_shape(step, state, batch)`)."
)


def _advice(lines: Sequence[Difference]) -> str:
    drifted = any(
        line.wanted
        and line.found
        and line.wanted != line.found
        and line.wanted.partition("[")[2] == line.found.partition("[")[2] != ""
        for line in lines
    )
    return _REBUILD + (_DRIFTED if drifted else "")


def is_state(value: Any) -> bool:
    """Whether an adapter recognises `value` itself as a leaf or as a container of leaves."""
    among = adapters()
    try:
        return leaf_adapter(value, among) is not None or bool(node_of(value, "", among, None))
    except StateError:
        return False


def put(root: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a leaf path in nested dicts, which are made where they are missing."""
    *parents, last = path.split("/")
    for part in parents:
        root = root.setdefault(unescape(part), {})
    root[unescape(last)] = value


def unflatten(leaves: Mapping[str, Leaf]) -> Any:
    """Leaves as nested dicts of NumPy arrays and Python scalars, for use without a template."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        put(root, path, plain_value(leaf))
    return root[""] if root.keys() == {""} else root


def _conflicts(changes: Sequence[_Change], leaves: Mapping[str, Leaf]) -> list[Difference]:
    """Objects that are in the target twice, for which the checkpoint has two different states."""
    paths: dict[int, str] = {}
    lines = []
    for change in changes:
        if isinstance(change.node, Stateful):
            first = paths.setdefault(id(change.node.target), change.path)
            if first != change.path:
                one, other = _below(leaves, first), _below(leaves, change.path)
                if one.keys() != other.keys() or not all(same(one[p], other[p]) for p in one):
                    reason = f"is one object with {first} in the target, the checkpoint has two"
                    lines.append(Difference(change.path, reason=reason))
    return lines


def _below(leaves: Mapping[str, Leaf], path: str) -> dict[str, Leaf]:
    return {
        at[len(path) :]: leaf
        for at, leaf in leaves.items()
        if not path or f"{at}/".startswith(f"{path}/")
    }


class _Change(NamedTuple):
    """What one object will be given: its state, or the children of a node that changes in place."""

    path: str
    node: Node | Stateful
    new: Any

    def carry_out(self) -> None:
        if isinstance(self.node, Node):
            with Named(self.path), _Wrapped("its value could not be set"):
                self.node.rebuild(self.new)
            return
        name = type_name(self.node.target)
        with Named(self.path), _Wrapped(f"a {name} did not take the state that was stored"):
            self.node.load(self.new)


def _apply(changes: Sequence[_Change], stored: Stored) -> None:
    """Change the objects in place: all of them, or none.

    Objects whose load may fail come first, each with a copy of its state from before. What comes
    last (modules, generators) cannot fail, so that no copy of a model is needed.
    """
    unsure: list[_Change] = []
    sure: list[_Change] = []
    for change in changes:
        can_fail = isinstance(change.node, Stateful) and change.node.can_fail
        (unsure if can_fail else sure).append(change)
    before: list[tuple[_Change, Callable[[], object], object]] = []
    begun: list[str] = []
    try:
        for change in unsure:
            assert isinstance(change.node, Stateful)
            with Named(change.path), _Wrapped("a copy of its present state could not be made"):
                digests = stored.digests(change.node, change.path)
                before.append((change, change.node.backup(), digests))
            change.carry_out()
        _compare(unsure, stored)
        for change in sure:
            begun.append(change.path)
            change.carry_out()
        _compare(sure, stored)
    except BaseException as error:
        lost = begun + _put_back(before, stored)
        if isinstance(error, StateError):
            then = "Every object has the state that it had before."
            if lost:
                then = (
                    f"These hold a mixture of old and new values: {', '.join(lost)}. Restore again "
                    f"before you go on training."
                )
            error.args = (f"{error} {then}",)
        raise


def _put_back(
    before: Sequence[tuple[_Change, Callable[[], object], object]], stored: Stored
) -> list[str]:
    """The paths of the objects that did not take their earlier state."""
    lost = []
    for change, undo, digests in reversed(before):
        assert isinstance(change.node, Stateful)
        try:
            undo()
            if stored.digests(change.node, change.path) != digests:
                lost.append(change.path)
        except BaseException:  # noqa: BLE001 - the error that led here is raised, and names this path
            lost.append(change.path)
    return lost


def _compare(changes: Sequence[_Change], stored: Stored) -> None:
    for change in changes:
        if not isinstance(change.node, Stateful):
            continue
        if lines := stored.differences(change.node, change.path):
            name = type_name(change.node.target)
            raise MismatchError(
                f"{change.path}: a {name} took the state that was stored, and returns another one:\n"
                f"{listed(lines)}\n"
                f"What `load_state_dict` is given, `state_dict` has to return."
            )


class _Wrapped:
    """Turns any other exception into a `StateError`, with the original as its cause."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, StateError):
            raise StateError(f"{self._what}: {type(error).__name__}: {error}") from error


def _collect(
    children: Sequence[tuple[str, Any]],
    path: str,
    among: Sequence[Adapter],
    leaves: Leaves,
    plain: Collection[str],
) -> None:
    # The loop of the user stands still here. So one call decides what a value is and gives its
    # bytes, and only a value that holds others costs a call of this function.
    prefix = f"{path}/" if path else ""
    at = path
    try:
        for key, value in children:
            at = prefix + key if key.isalnum() else join(path, key)
            for adapter in among:
                leaf = adapter.leaf(value)
                if leaf is not None:
                    break
            else:
                node = node_of(value, at, among, None)
                if isinstance(node, Stateful):
                    below = lambda children, path: _collect(children, path, among, leaves, ())  # noqa: E731
                    Collector(among, leaves, below).collect(node, at)
                else:
                    _collect(node.children, at, among, leaves, plain)
                continue
            if at in leaves:
                raise two_leaves(at)
            leaves[at] = leaf
            if at in plain and not is_plain(value) and not here().owns(at):
                leaves.containers[at] = Container("array", arrays=array_class(value))
    except StateError as error:
        name_error(error, at)
        raise
