"""One walk of a live state, from which a save, a template, a digest and every check are read.

A `Walk` has the path, the value and the kind of everything in a state: its leaves in columns, because
there may be very many, and its containers and objects as `Branch`es. Invariant: a value is looked at
once. Whoever needs the same state again is given the `Walk` in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.leaf_errors import add_path, duplicate_path, nested_too_deeply
from perdure.state.leaf_spec import LeafSpec
from perdure.state.paths import TOGETHER, join_keys, join_part
from perdure.state.per_rank import current_rank_context
from perdure.state.stateful import Stateful
from perdure.store.json_blocks import blocks
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import Container
from perdure.store.selection import Selection

ANY_LENGTH = (deque, set, frozenset)
GROWING = (list, tuple, dict, *ANY_LENGTH)
"""Containers whose size or kind a run may change."""


class Described(Stateful):
    """A value of a target in whose place a restore builds what the checkpoint describes."""


def is_described(like: Any, entry: Container | None) -> bool:
    """Whether a restore builds the value of `entry` in the place of `like`, which is no object."""
    return entry is not None and entry.grown and (like is None or type(like) in GROWING)


class Branch:
    """An interior value: a container with its parts, an object, or a value that was not entered.

    `node` is None for what a selection leaves out. A part is the number of a leaf, or a `Branch`.
    """

    __slots__ = ("node", "parts", "path", "value")

    def __init__(self, path: str, value: Any, node: Node | Stateful | None) -> None:
        self.path = path
        self.value = value
        self.node = node
        self.parts: list[int | Branch] = []


class Walk:
    """The leaves, containers and objects of a state by path.

    Args:
        state: a tree of containers, arrays, scalars and objects of the frameworks that are imported.
        stored: for a restore, the specs of the checkpoint by path, because the structure of some values
            depends on what was stored.
        path: the path of `state`, if it is a part of another one.
        selection: which leaves to walk. Other branches are not entered, so that they may hold anything.
        adapters: what takes the values; by default the adapters of the imported frameworks.
        containers: for a restore, what the checkpoint says about containers.

    Attributes:
        root: the state itself, as the number of a leaf or a `Branch`.
        paths, values: the leaves, in their order.
        runs: (start, stop) of leaves of one type.
        takers: the adapter of each type of leaf.
        objects: the objects with `load_state_dict` by path.
        states: the states of those objects that have been read.
        branches: the containers.
        kinds: the types of the containers.
        unselected: the paths of leaves and objects that are not selected.
        pruned: the paths of the branches that were not entered.

    Raises:
        UnsupportedLeafError: a value cannot be restored exactly. The message starts with its path.
    """

    def __init__(
        self,
        state: Any,
        stored: Mapping[str, LeafSpec] | None = None,
        path: str = "",
        selection: Selection | None = None,
        adapters: Sequence[Adapter] | None = None,
        containers: Mapping[str, Container] | None = None,
    ) -> None:
        self.state = state
        self.paths: list[str] = []
        self.values: list[Any] = []
        self.takers: dict[type, Adapter | None] = {}
        self.objects: dict[str, Stateful] = {}
        self.states: dict[str, Any] = {}
        self.branches: list[Branch] = []
        self.kinds: set[type] = set()
        self.unselected: set[str] = set()
        self.pruned: set[str] = set()
        self.adapters = adapters or loaded_adapters()
        self._stored = stored
        self._containers = containers or {}
        self._selection = selection
        self._is_whole = selection is None and not containers
        self.runs: list[tuple[int, int]] = []
        try:
            self.root = self._visit(state, path)
        except RecursionError:
            raise nested_too_deeply() from None
        self.members = current_rank_context().members
        """The `PerRank` members, as `RankContext.members`."""

    @classmethod
    def of(cls, state: Any) -> Walk:
        """`state` itself if it is a walk, or else the walk of it."""
        if isinstance(state, Unwalked):
            state.walk = cls.of(state.walk or state.state)
            return state.walk
        if not isinstance(state, Walk):
            return cls(state)
        current_rank_context().members.update(state.members)
        return state

    @cached_property
    def specs(self) -> list[LeafSpec]:
        """dtype and shape of each leaf."""
        specs: list[LeafSpec] = []
        for start, stop, taker in self._blocks():
            many = taker.specs(self.values[start:stop]) if stop - start > 1 else None
            if many is None:
                many = [self._ask(taker.spec, number) for number in range(start, stop)]
            specs += many
        return specs

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """Path and value of each leaf."""
        return zip(self.paths, self.values, strict=True)

    @cached_property
    def by_path(self) -> dict[str, Any]:
        """The leaves by path."""
        return dict(self.pairs())

    def leaves(self, adapters: Sequence[Adapter] | None = None) -> Leaves:
        """The bytes of the leaves, without those of objects.

        Args:
            adapters: what makes leaves of arrays, in the order of `self.adapters`.
        """
        # The training loop waits for this, so that leaves of one type are asked for in few calls.
        instead = dict(zip(map(id, self.adapters), adapters or self.adapters, strict=True))
        leaves = Leaves()
        for start, stop, taker in self._blocks():
            taker = instead[id(taker)]
            paths = self.paths[start:stop]
            many = taker.leaves(self.values[start:stop]) if stop - start > 1 else None
            if many is None:
                many = [self._ask(taker.leaf, number) for number in range(start, stop)]
            if not all(map(is_, map(leaves.setdefault, paths, many), many)):
                pairs = zip(paths, many, strict=True)
                twice = next(path for path, leaf in pairs if leaves[path] is not leaf)
                error = duplicate_path(twice)
                add_path(error, twice)
                raise error
        return leaves

    def _blocks(self) -> Iterator[tuple[int, int, Adapter]]:
        """(start, stop, adapter) of leaves of one type, at most `TOGETHER` of them."""
        for first, end in self.runs:
            taker = self.takers[type(self.values[first])]
            assert taker is not None
            for start in range(first, end, TOGETHER):
                yield start, min(start + TOGETHER, end), taker

    def _ask(self, verb: Any, number: int) -> Any:
        try:
            answer = verb(self.values[number])
        except StateError as error:
            add_path(error, self.paths[number])
            raise
        assert answer is not None
        return answer

    def _visit(self, value: Any, path: str) -> int | Branch:
        if self._is_whole:  # of a save: nothing is left out, and the state alone decides
            taker = self.takers.get(type(value), ...)
            if taker is not None and taker is not ...:
                return self._add((path,), (value,))
        selection = self._selection
        is_selected = selection is None or selection.matches(path)
        if not is_selected and not (selection and selection.may_hold(path)):
            self.pruned.add(path)
            return Branch(path, value, None)
        if is_selected and is_described(value, self._containers.get(path)):
            self.objects[path] = described = Described(value)
            return Branch(path, value, described)
        try:
            if self._taker(value) is not None:
                if is_selected:
                    return self._add([path], [value])
                self.unselected.add(path)
                return Branch(path, value, None)
            node = node_of(value, path, self.adapters, self._stored)
        except StateError as error:
            add_path(error, path)
            if is_selected or not isinstance(error, UnsupportedLeafError):
                raise
            self.pruned.add(path)
            return Branch(path, value, None)
        branch = Branch(path, value, node)
        if isinstance(node, Stateful):
            if is_selected or self._selects_inside(node, path):
                self.objects[path] = node
            else:
                self.unselected.add(path)
                branch.node = None
            return branch
        self.branches.append(branch)
        self.kinds.add(type(value))
        children = node.children
        if count := len(children):
            self._visit_parts(
                [children] if count <= TOGETHER else blocks(children, TOGETHER), branch
            )
        return branch

    def _visit_parts(self, of_branch: Iterable[Iterable[tuple[str, Any]]], branch: Branch) -> None:
        parts = branch.parts
        for block in of_branch:
            keys, values = zip(*block, strict=True)
            paths = join_keys(branch.path, keys)
            # There may be very many leaves of a type that was met before.
            kinds = set(map(type, values))
            is_known = len(kinds) == 1 and self.takers.get(*kinds) is not None
            if is_known and self._selection is None and (*kinds,) != (type(None),):
                first = self._add(paths, values)
                parts.extend(range(first, first + len(values)))
            else:
                parts.extend(map(self._visit, values, paths))

    def _add(self, paths: Sequence[str], values: Sequence[Any]) -> int:
        """Add leaves of one type; returns the number of the first."""
        first, stop = len(self.paths), len(self.paths) + len(paths)
        self.paths.extend(paths)
        self.values.extend(values)
        if self.runs and type(self.values[self.runs[-1][0]]) is type(values[0]):
            self.runs[-1] = self.runs[-1][0], stop
        else:
            self.runs.append((first, stop))
        return first

    def _taker(self, value: Any) -> Adapter | None:
        """The adapter for which a value is a leaf, which its type decides."""
        kind = type(value)
        try:
            return self.takers[kind]
        except KeyError:
            found = leaf_adapter(value, self.adapters)
            taker = self.takers[kind] = None if found is None else found[0]
            return taker

    def _selects_inside(self, node: Stateful, path: str) -> bool:
        """Whether something inside an object is selected: in the checkpoint, or in the target."""
        assert self._selection is not None
        below = f"{path}/" if path else ""
        inside = [leaf for leaf in self._stored or () if leaf.startswith(below)]
        inside += [join_part(path, part) for part in node.parts() or ()]
        return any(map(self._selection.matches, inside))


class Unwalked:
    """A state whose walk is made once, when one is first asked for: a call may need none."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.walk: Walk | None = None


def leaf_of(value: Any) -> Leaf | None:
    """The leaf of one value; None if it is none."""
    taken = leaf_adapter(value, loaded_adapters())
    return None if taken is None else taken[0].leaf(value)
