"""One walk of a live state, from which a save, a digest and every check are read; and templates.

Leaves are in columns, because there may be very many; containers and objects are `Branch`es. Invariant:
each value is visited once. Callers that need the same state again pass the `Walk` instead of the state.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter, eq
from types import NoneType
from typing import Any

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, Stateful, leaf_adapter, loaded_adapters
from perdure.state.containers import ANY_LENGTH, PLAIN_MAPPINGS, describe_record
from perdure.state.leaf_spec import (
    AttributeErrors,
    Check,
    Difference,
    LeafSpec,
    PathInErrors,
    add_path,
    duplicate_path,
    fits,
    nested_too_deeply,
    type_name,
)
from perdure.state.leaf_values import SCALARS
from perdure.state.paths import LISTED, below, join_keys, join_part, nearest
from perdure.state.per_rank import PerRank, current_rank_context, per_rank_node
from perdure.state.program_code import (
    changed_cells,
    is_bound_to_container,
    is_code,
    is_plain_object,
    is_process_resource,
    is_user_class,
)
from perdure.state.value_forms import Form
from perdure.store.format import blocks
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import Container
from perdure.store.selection import Selection

TOGETHER = 128
"""How many children of a container are visited in one call, if they are leaves of one type."""

_MOST_VISITS, _MOST_PATHS = 20_000, 50
"""A graph of objects is refused if it exceeds both limits, because a walk follows each path."""

_FEW = 4
"""If runs of leaves are shorter on average, adapters are asked for each leaf alone."""

_PLAIN_CONTAINERS = (dict, list, tuple)
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
MAPPINGS = (Form, *PLAIN_MAPPINGS)
GROWING = (list, tuple, *MAPPINGS, *ANY_LENGTH)
"""Containers whose size or kind a run may change."""


def may_change_kind(value: Any) -> bool:
    """Whether a run may replace this value of its target by a plain value of another kind."""
    kind = type(value)
    return kind in SCALARS or kind in GROWING or kind is bytearray or bool(describe_record(value))


_CONTAINER_METHOD = (
    "a method of a list, a dict, a set or a deque. A restore makes a new one, on which it would not "
    "work. Write a function that looks it up (`lambda: len(self.words)`)."
)


class RebuiltTarget(Stateful):
    """A value of a target that a restore replaces by the value that the checkpoint describes."""


class Branch:
    """A container with its parts (numbers of leaves, or `Branch`es), an object, or a skipped value."""

    __slots__ = ("node", "parts", "path", "value")

    def __init__(self, path: str, value: Any, node: Node | Stateful | None) -> None:
        self.path = path
        self.value = value
        self.node = node
        self.parts: list[int | Branch] = []

    @property
    def structure(self) -> Any:
        """The value that a manifest describes; for a mapping whose keys have no text its form."""
        if type(self.value) in MAPPINGS and isinstance(self.node, Node) and len(self.parts) == 2:
            children = Form(self.node.children)
            return children if (*children,) == LISTED else self.value
        return self.value


class Walk:
    """The leaves, containers and objects of a state by path.

    `stored` and `containers` say for a restore what the checkpoint has: some structures depend on
    it. Branches that `selection` leaves out are not entered (`unselected`, `pruned`). `root` is the
    number of a leaf or a `Branch`; `runs` are (start, stop) of leaves of one type, `takers` its
    adapters. Raises UnsupportedLeafError, with the path, for a value that cannot be restored
    exactly.
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
        self.inside: list[tuple[str, Any]] = []
        """Arrays and containers in the states of objects of the program."""
        self.code: dict[str, Any] = {}
        """The functions in objects of the program, and `Node.code`. A restore keeps those of the
        target."""
        self.branches: list[Branch] = []
        self.kinds: set[type] = set()
        self.unselected: set[str] = set()
        self.pruned: set[str] = set()
        self.adapters = adapters or loaded_adapters()
        self._stored = stored
        self._containers = containers or {}
        self._selection = selection
        self._grown = {path for path, entry in self._containers.items() if entry.grown}
        self._starts: list[int] = []  # of runs
        self._is_in_object = False
        self._seen: set[int] = set()
        self._visits = 0
        self._entered: dict[int, str] = {}
        """The objects around the present one: an attribute that refers to its owner is no new part."""
        try:
            self.root = self._visit(state, path)
        except RecursionError:
            raise nested_too_deeply() from None
        self.members = current_rank_context().members
        """The `PerRank` members, as `RankContext.members`."""
        self.runs = [*pairwise([*self._starts, len(self.paths)])]

    @classmethod
    def of(cls, state: Any) -> Walk:
        """`state` itself if it is a walk, or else the walk of it."""
        if isinstance(state, LazyWalk):
            state.walk = cls.of(state.walk or state.state)
            return state.walk
        if not isinstance(state, Walk):
            return cls(state)
        current_rank_context().members.update(state.members)
        return state

    @cached_property
    def specs(self) -> list[LeafSpec]:
        """dtype and shape of each leaf."""
        return self._ask("spec", "specs", self.adapters)

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """Path and value of each leaf."""
        return zip(self.paths, self.values, strict=True)

    @cached_property
    def by_path(self) -> dict[str, Any]:
        """The leaves by path."""
        return dict(self.pairs())

    @property
    def targets(self) -> dict[str, Any]:
        """The objects with a state of their own by path."""
        return {path: node.target for path, node in self.objects.items()}

    def user_objects(self) -> list[Branch]:
        """The objects of the program and the dataclasses."""
        kinds = {kind for kind in self.kinds if is_dataclass(kind) or is_user_class(kind)}
        return [each for each in self.branches if type(each.value) in kinds] if kinds else []

    def torch_objects(self, name: str) -> list[tuple[str, Any]]:
        """Path and object for each object of a class of PyTorch (`nn.Module`); none without PyTorch."""
        torch = sys.modules.get("torch")
        kind = () if torch is None else attrgetter(name)(torch)
        found = ((path, node.target) for path, node in self.objects.items())
        return [(path, target) for path, target in found if isinstance(target, kind)]

    def leaves(self, adapters: Sequence[Adapter] | None = None) -> Leaves:
        """The bytes of the leaves outside of objects; `adapters` replace `self.adapters`."""
        taken = self._ask("leaf", "leaves", adapters or self.adapters)
        leaves = Leaves(dict(zip(self.paths, taken, strict=True)))
        if len(leaves) < len(taken):
            twice = next(path for path, count in Counter(self.paths).items() if count > 1)
            error = duplicate_path(twice)
            add_path(error, twice)
            raise error
        return leaves

    def _ask(self, one: str, many: str, adapters: Sequence[Adapter]) -> list[Any]:
        """What the adapters answer about each leaf; leaves of one type are asked for together."""
        instead = dict(zip(map(id, self.adapters), adapters, strict=True))
        takers = {kind: instead[id(taker)] for kind, taker in self.takers.items() if taker}
        ask = {kind: getattr(taker, one) for kind, taker in takers.items()}
        answers: list[Any] = []
        try:
            if len(self.runs) * _FEW > len(self.values):
                answers.extend(ask[type(value)](value) for value in self.values)
                return answers
            for first, end in self.runs:
                kind = type(self.values[first])
                for start in range(first, end, TOGETHER):
                    values = self.values[start : min(start + TOGETHER, end)]
                    together = getattr(takers[kind], many)(values) if len(values) > 1 else None
                    answers.extend(map(ask[kind], values) if together is None else together)
        except StateError as error:  # `extend` has added the answers before this one
            add_path(error, self.paths[len(answers)])
            raise
        return answers

    def _visit(self, value: Any, path: str) -> int | Branch:
        selection = self._selection
        is_selected = selection is None or selection.matches(path)
        if not is_selected and not (selection and selection.may_hold(path)):
            self.pruned.add(path)
            return Branch(path, value, None)
        entry = self._containers.get(path)
        if (
            is_selected
            and entry is not None
            and entry.grown
            and (
                may_change_kind(value)
                or (entry.kind == "array" and hasattr(value, "shape"))
                or is_plain_object(value)
                or isinstance(value, (list, tuple, Mapping))
            )
        ):
            self.kinds.add(type(value))
            self.objects[path] = described = RebuiltTarget(value)
            return Branch(path, value, described)
        try:
            if (kind := type(value)) not in self.takers:
                found = leaf_adapter(value, self.adapters)
                self.takers[kind] = None if found is None else found[0]
            if self.takers[kind] is not None:
                if is_selected:
                    return self._add((path,), (value,))
                self.unselected.add(path)
                return Branch(path, value, None)
            if self._is_in_object and is_process_resource(value):
                return Branch(path, value, None)
            if self._is_in_object and is_bound_to_container(value):
                raise UnsupportedLeafError(_CONTAINER_METHOD)
            if self._is_in_object and is_code(value):
                self.code[path] = value
                return self._method_of_object(value, path)
            if (first := self._entered.get(id(value))) is not None:
                self.code[path] = f"the object at {first}"
                return Branch(path, value, None)
            attributes: list[str] | None = None
            if entry is not None and entry.kind == "object" and entry.keys is not None:
                attributes = [*map(str, entry.keys)]
            if isinstance(value, defaultdict) and is_bound_to_container(
                value.default_factory, value
            ):
                raise UnsupportedLeafError(_CONTAINER_METHOD)
            node = node_of(value, path, self.adapters, self._stored, attributes)
        except StateError as error:
            add_path(error, path)
            if is_selected or not isinstance(error, UnsupportedLeafError):
                raise
            self.pruned.add(path)
            return Branch(path, value, None)
        branch = Branch(path, value, node)
        if isinstance(node, Stateful):
            for number, code in enumerate(getattr(value, "lr_lambdas", ())):
                # Equal for a function and for one that the same line has made again.
                made = getattr(code, "__code__", None)
                name = made and (made.co_filename, made.co_firstlineno, made.co_code)
                self.code[f"{path}/lr_lambdas/{number}"] = name or code
            if is_selected or self._selects_inside(node, path):
                self.objects[path] = node
            else:
                self.unselected.add(path)
                branch.node = None
            return branch
        if node.code:
            self.code |= {join_part(path, inside): each for inside, each in node.code.items()}
        self.branches.append(branch)
        self.kinds.add(kind := type(value))
        is_inside = self._is_in_object
        self._is_in_object = is_inside or is_user_class(kind)
        if node.in_place:
            self._entered[id(value)] = path or "the top"
            self._seen.add(id(value))
            self._visits += 1
            if self._visits > _MOST_VISITS and self._visits > _MOST_PATHS * len(self._seen):
                raise UnsupportedLeafError(
                    f"{path}: the objects here refer to each other in so many ways that there are "
                    f"more than {_MOST_PATHS} paths to each. Keep them in one list or dict, and in "
                    f"the objects their numbers or names."
                )
        children, parts = node.children, branch.parts
        for block in [children] if len(children) <= TOGETHER else blocks(children, TOGETHER):
            if not block:
                continue
            keys, values = zip(*block, strict=True)
            paths = join_keys(path, keys)
            kind = type(values[0])
            # There may be very many leaves of a type that was met before.
            if kind not in self.takers:
                parts.append(self._visit(values[0], paths[0]))
                values, paths = values[1:], paths[1:]
            is_known = self._selection is None and self.takers.get(kind) is not None
            if self._grown:
                is_known = is_known and self._grown.isdisjoint(paths)
            if is_known and kind is not NoneType and set(map(type, values)) == {kind}:
                first = self._add(paths, values)
                parts.extend(range(first, first + len(values)))
            else:
                parts.extend(map(self._visit, values, paths))
        self._is_in_object = is_inside
        self._entered.pop(id(value), None)
        return branch

    def _method_of_object(self, value: Any, path: str) -> Branch:
        """A function with the variables that it closes over and changes; a bound method with its
        object, if that is an object of the program and the method does not lie in it."""
        owner, cells = getattr(value, "__self__", None), changed_cells(value)
        if is_plain_object(owner) and not any(owner is branch.value for branch in self.branches):
            children = [("__self__", owner)]
        elif cells:
            children = [(name, cell.cell_contents) for name, cell in cells.items()]
        else:
            return Branch(path, value, None)

        def put(new: list[Any]) -> Any:
            for cell, contents in zip(cells.values(), new, strict=False):
                cell.cell_contents = contents
            return value

        before = [child for _, child in children]
        node = Node(children, put, in_place=True, undo=lambda: put(before))
        branch = Branch(path, value, node)
        self.branches.append(branch)
        paths = join_keys(path, [name for name, _ in children])
        branch.parts += [
            self._visit(part, at) for (_, part), at in zip(children, paths, strict=True)
        ]
        return branch

    def _add(self, paths: Sequence[str], values: Sequence[Any]) -> int:
        first = len(self.paths)
        if not first or type(self.values[-1]) is not type(values[0]):
            self._starts.append(first)
        self.paths.extend(paths)
        self.values.extend(values)
        return first

    def _selects_inside(self, node: Stateful, path: str) -> bool:
        """Whether something inside an object is selected: in the checkpoint, or in the target."""
        assert self._selection is not None
        below = f"{path}/" if path else ""
        inside = [leaf for leaf in self._stored or () if leaf.startswith(below)]
        inside += [join_part(path, part) for part in node.parts() or ()]
        return any(map(self._selection.matches, inside))


class LazyWalk:
    """A state whose walk is made once, at the first request: a call may need no walk."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.walk: Walk | None = None


def node_of(
    value: Any,
    path: str,
    adapters: Sequence[Adapter],
    stored: Mapping[str, LeafSpec] | None,
    attributes: Sequence[str] | None = None,
) -> Node | Stateful:
    """The interior value at `path`. In a restore `stored` has the specs of the whole checkpoint, and
    `attributes` the stored names of attributes of an object whose attributes the run has changed."""
    stored_below = None if stored is None else SpecsBelow(stored, path, attributes)
    if isinstance(value, PerRank):
        return per_rank_node(value, stored_below, path)
    # No framework takes plain containers, and there may be very many of them.
    with AttributeErrors(value):
        for candidate in adapters[-1:] if type(value) in _PLAIN_CONTAINERS else adapters:
            if (node := candidate.node(value, stored_below)) is not None:
                return node
    raise UnsupportedLeafError(
        f"a value of type {type_name(value)} has no exact form in a checkpoint. {_remedy(value)}"
    )


def _remedy(value: Any) -> str:
    modules = [cls.__module__ for cls in type(value).__mro__]
    if any(name.startswith("tensorflow.python.data.") for name in modules):
        return (
            "Save its iterator, `iter(dataset)`, or leave it out of the state, and begin the data at "
            "the restored step: `dataset.skip(start)`, with a `seed` for each `shuffle`."
        )
    if any(name.startswith("keras.src.optimizers.schedules.") for name in modules):
        return "It has no state: the optimizer counts its steps. Save the optimizer."
    if type(value) is partial:
        return "Write a lambda or a method in its place (`lambda: f(self.rng)`)."
    return (
        "Give it `state_dict` and `load_state_dict`, turn it into a list, arrays or scalars, or "
        "leave it out of the state."
    )


class SpecsBelow(Mapping[str, LeafSpec]):
    """The part of a mapping below one path. It is searched only if an adapter looks at it."""

    def __init__(
        self,
        specs: Mapping[str, LeafSpec],
        path: str,
        attributes: Sequence[str] | None = None,
    ) -> None:
        self._specs = specs
        self.attributes = attributes
        self._prefix = f"{path}/" if path else ""

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (path[start:] for path in self._specs if path.startswith(self._prefix))

    def __getitem__(self, path: str) -> LeafSpec:
        return self._specs[self._prefix + path]

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Template:
    """The leaves of a target, and the checks of its objects with `load_state_dict`. Holds no array."""

    paths: list[str] = field(default_factory=list)
    specs: list[LeafSpec] = field(default_factory=list)
    """The specs of the leaves, in the order of `paths`."""
    objects: dict[str, Check] = field(default_factory=dict)

    @cached_property
    def leaves(self) -> dict[str, LeafSpec]:
        """The specs by path. There may be very many, and they are not always needed."""
        return dict(zip(self.paths, self.specs, strict=True))


def template_of(like: Any) -> Template:
    """The template of a target, or of the target that was walked."""
    walk = like if isinstance(like, Walk) else Walk(like)
    checks = {}
    for path, node in walk.objects.items():
        with PathInErrors(path, f"a {type_name(node.target)} did not return its state"):
            checks[path] = node.check()
    return Template(walk.paths, walk.specs, checks)


def same_specs(
    paths: Collection[str], specs: Collection[LeafSpec], leaves: Mapping[str, Leaf]
) -> bool:
    """Whether leaves have these paths, dtypes and shapes in this order; no Python code for each."""
    return (
        len(paths) == len(leaves)
        and all(map(eq, paths, leaves))
        and all(map(eq, map(_DTYPE, specs), map(_DTYPE, leaves.values())))
        and all(map(eq, map(_SHAPE, specs), map(_SHAPE, leaves.values())))
    )


def differences(template: Template, leaves: Mapping[str, Leaf]) -> list[Difference]:
    """Every path at which the leaves do not fit the template, sorted; objects decide themselves."""
    if not template.objects and same_specs(template.paths, template.specs, leaves):
        return []
    missing = dict(template.leaves)
    lines: list[Difference] = []
    containers = containers_of(leaves)
    inside, outside = leaves_of_objects(template.objects, leaves)
    for path, leaf in outside.items():
        expected = missing.pop(path, None)
        if expected is None or (expected.dtype, expected.shape) != (leaf.dtype, leaf.shape):
            present = LeafSpec.of(leaf)
            if expected is not None and expected.dtype == "py:none" and path in containers:
                continue
            if expected is None or not fits(expected, present):
                text = expected and expected.describe()
                lines.append(Difference(path, text, present.describe()))
    lines += [Difference(path, spec.describe()) for path, spec in missing.items()]
    for parent, check in template.objects.items():
        lines += [
            line._replace(path=join_part(parent, line.path)) for line in check(inside[parent])
        ]
    return sorted(lines, key=lambda line: line.path)


def leaves_of_objects(
    objects: Collection[str], leaves: Mapping[str, Leaf]
) -> tuple[dict[str, Leaves], Mapping[str, Leaf]]:
    """The leaves and containers of each object by their paths in it, and the leaves of none."""
    if not objects:
        return {}, leaves
    inside, outside = {path: Leaves() for path in objects}, dict[str, Leaf]()
    for path, entry in containers_of(leaves).items():
        if (parent := nearest(path, inside)) is not None:
            inside[parent].containers[below(path, parent)] = entry
    for path, leaf in leaves.items():
        if (parent := nearest(path, inside)) is None:
            outside[path] = leaf
        else:
            inside[parent][below(path, parent)] = leaf
    return inside, outside
