"""Plans a restore: which leaf of a checkpoint goes where, and which parts of the target stay.

Invariant: a plan changes nothing, and what a plan without `differences` restores fits the target.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from perdure.errors import MismatchError, StateError
from perdure.state.cast import cast_leaf
from perdure.state.leaf_errors import type_name
from perdure.state.leaf_spec import Difference, LeafSpec, fits, format_differences
from perdure.state.object_restore import ObjectStates
from perdure.state.paths import ancestors, join_part, nearest
from perdure.state.per_rank import current_rank_context, rank_context
from perdure.state.restore_report import RestoreReport
from perdure.state.restore_request import RestoreRequest
from perdure.state.shard_targets import misplaced, shard_targets
from perdure.state.template import differences, template_of_walk
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import Container

_WHOLE = (
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
    np.ma.MaskedArray,
)
"""Classes whose values are never restored in part, although each of their leaves has a path."""


class StoredState(NamedTuple):
    """What a checkpoint has, whether its bytes were read or not."""

    specs: Mapping[str, LeafSpec]
    containers: Mapping[str, Container]

    @classmethod
    def of(cls, leaves: Mapping[str, Leaf]) -> StoredState:
        """All that was read."""
        return cls(
            {path: LeafSpec.of(leaf) for path, leaf in leaves.items()}, containers_of(leaves)
        )


@dataclass
class RestorePlan:
    """What a restore does. All paths are those of the target, after a rename.

    Attributes:
        walk: The target.
        leaves: What is restored.
        specs: Everything that the checkpoint has.
        keep: Leaves, values of modules and objects of the target that keep their value.
        keep_branches: Branches of the target that are not entered.
        expected: dtype and shape of each leaf of the target that can be restored on its own; None if it
            takes any. Empty if everything has to fit.
        sharded: By path, the arrays of the target that decide how leaves of objects are sharded.
        report: How the result differs from a restore of everything.
        differences: Why it cannot be done; empty if it can.
    """

    walk: Walk
    leaves: Leaves
    specs: Mapping[str, LeafSpec]
    keep: set[str]
    keep_branches: set[str]
    expected: dict[str, LeafSpec | None] = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    report: RestoreReport = field(default_factory=RestoreReport)
    differences: list[Difference] = field(default_factory=list)


def plan_restore(
    like: Any,
    leaves: Mapping[str, Leaf],
    request: RestoreRequest,
    stored: StoredState,
    refusals: Mapping[str, str] | None = None,
) -> RestorePlan:
    """The plan for a restore into `like`.

    Args:
        like: the target.
        leaves: the leaves of the checkpoint that were read, by their paths there.
        request: what to restore, and how.
        stored: everything that the checkpoint has.
        refusals: why an object did not take its state, by the path of the object. They are kept.

    Raises:
        MismatchError: a pattern or a rename fits nothing.
        UnsupportedLeafError: a value of the target cannot be restored exactly.
    """
    renaming = request.renaming
    if renaming:
        renaming.check(stored.specs, stored.containers)
        stored = StoredState(renaming.rename(stored.specs), renaming.rename(stored.containers))
    context = current_rank_context()
    with rank_context(context.index, context.count) as ranks:
        walk = Walk(
            like,
            stored.specs,
            selection=request.selection,
            containers=stored.containers,
        )
    own = renaming.rename(leaves)
    if ranks.members:  # of a `PerRank` member, only the leaves of this process are restored
        own = {path: leaf for path, leaf in own.items() if not ranks.leaves_out(path)}
    planner = _Planner(walk, Leaves(own, stored.containers), request, stored, refusals or {})
    plan = planner.plan()
    if any(leaf.shards is not None for leaf in own.values()):
        targets = shard_targets(walk, stored.specs)
        plan.sharded = {path: target.like for path, target in targets.items()}
    renamed = (
        sorted(renaming(path) for path in leaves if renaming(path) != path) if renaming else []
    )
    plan.report = planner.report(tuple(path for path in renamed if path in plan.leaves))
    return plan


class _Planner:
    """One plan under construction. The dicts of differences have a line of text for each path."""

    def __init__(
        self,
        walk: Walk,
        leaves: Leaves,
        request: RestoreRequest,
        stored: StoredState,
        refusals: Mapping[str, str],
    ) -> None:
        self._refusals = refusals
        self._walk, self._request, self._stored = walk, request, stored
        self._template = template_of_walk(walk)
        unselected, pruned = set(walk.unselected), set(walk.pruned)
        self._plan = RestorePlan(walk, leaves, stored.specs, unselected, pruned)
        self._parts: dict[str, Mapping[str, LeafSpec | None] | None] = {}
        if not request.is_strict:
            self._parts = {path: node.parts() for path, node in walk.objects.items()}
            self._plan.expected.update(self._template.leaves)
        for path, parts in self._parts.items():
            for part, spec in (parts or {}).items():
                self._plan.expected[join_part(path, part)] = spec
        self._missing: dict[str, Difference] = {}
        self._unexpected: dict[str, Difference] = {}
        self._mismatched: dict[str, Difference] = {}
        self._kept_whole: dict[str, Difference] = {}
        self._cast: dict[str, Difference] = {}
        self._refused: dict[str, Difference] = {}

    def plan(self) -> RestorePlan:
        request, plan = self._request, self._plan
        if request.selection is not None:
            self._check_patterns()
            self._select_parts()
        if request.cast or not request.strict:
            self._compare_leaves()
        if not request.strict:
            plan.keep |= self._missing.keys() | self._mismatched.keys()
            self._keep_dependants()
            self._compare_objects()
            self._keep_wholes()
            self._keep_dependants()
            self._refuse_abstract()
        if plan.keep or plan.keep_branches or self._unexpected:
            plan.leaves = self._without_kept()
            if not plan.leaves and not request.strict:
                self._refuse_nothing()
        lines = {line.path: line for line in differences(self._template, plan.leaves)}
        lines |= {line.path: line for line in misplaced(self._walk.by_path)}
        kept = [path for path in lines if self._is_kept(path) or self._is_left_out(path)]
        plan.differences = sorted(
            ({**lines, **self._refused}[path])
            for path in (lines.keys() - kept) | self._refused.keys()
        )
        return plan

    def report(self, renamed: tuple[str, ...]) -> RestoreReport:
        """How the result of this plan differs from a restore of everything."""
        cast = {path: line for path, line in self._cast.items() if not self._is_kept(path)}
        groups = (self._missing, self._unexpected, self._mismatched)
        lines = [line for group in groups for line in group.values()]
        text = [*self._kept_whole.values(), *sorted(lines), *cast.values()]
        selection = self._request.selection
        return RestoreReport(
            *(tuple(sorted(group)) for group in (*groups, self._kept_whole)),
            renamed=renamed,
            cast=tuple(sorted(cast)),
            leaves=() if selection is None else selection.patterns,
            text=format_differences(text) if text else "",
        )

    def _refuse_nothing(self) -> None:
        """A restore of nothing at all is a mistake, most likely in the names."""
        groups = (self._missing, self._unexpected, self._mismatched, self._kept_whole)
        self._refused = {path: line for group in groups for path, line in group.items()}

    def _without_kept(self) -> Leaves:
        leaves = self._plan.leaves
        return Leaves(
            {
                path: leaf
                for path, leaf in leaves.items()
                if path not in self._unexpected and not self._is_kept(path)
            },
            {
                path: container
                for path, container in leaves.containers.items()
                if not self._is_kept(path) and self._has_place(path)
            },
        )

    def _has_place(self, path: str) -> bool:
        """Whether the container at `path` is that of an object, or in a part that a module has."""
        owner = self._owner(path)
        if self._request.strict or owner is None or self._parts[owner] is None:
            return True
        return path == owner or nearest(path, self._plan.expected) is not None

    def _is_kept(self, path: str) -> bool:
        plan = self._plan
        return any(above in plan.keep or above in plan.keep_branches for above in ancestors(path))

    def _is_left_out(self, path: str) -> bool:
        """Whether `path` is a tensor of a module that is never saved, and was not asked for."""
        selection, owner = self._request.selection, self._owner(path)
        if selection is None or owner is None or self._parts[owner] is None:
            return False
        return path not in self._plan.expected and not selection.matches(path)

    def _owner(self, path: str) -> str | None:
        """The path of the object that the leaf at `path` is in."""
        return nearest(path, self._parts)

    def _check_patterns(self) -> None:
        """Raise `MismatchError` for a pattern that fits nothing."""
        selection, strict = self._request.selection, self._request.strict
        assert selection is not None
        inside = [path for path in self._stored.specs if self._owner(path) is not None]
        not_in_target = selection.unused([*self._plan.expected, *self._parts, *inside])
        not_stored = selection.unused([*self._stored.specs, *self._stored.containers])
        for pattern in not_in_target:
            if strict or pattern in not_stored:
                raise MismatchError(
                    f"{pattern}: the target has no such leaf or branch; nothing was changed. An object "
                    f"with `load_state_dict` that is no module (an optimizer) is restored as a whole."
                )
        if strict and not_stored:
            raise MismatchError(
                f"{not_stored[0]}: the checkpoint has no such leaf or branch; nothing was changed."
            )

    def _select_parts(self) -> None:
        """Keep the values of modules that are not selected; refuse parts of what has no parts."""
        selection = self._request.selection
        assert selection is not None
        inside: dict[str, list[str]] = {path: [] for path in self._parts}
        for path in self._stored.specs:
            if (owner := self._owner(path)) is not None:
                inside[owner].append(path)
        for owner, parts in self._parts.items():
            if selection.matches(owner):
                continue
            units = {owner} if parts is None else {join_part(owner, part) for part in parts}
            if parts is not None:
                self._plan.keep |= {unit for unit in units if not selection.matches(unit)}
            below: dict[str, list[str]] = {}
            for path in inside[owner]:
                if (unit := nearest(path, units)) is not None and unit != path:
                    below.setdefault(unit, []).append(path)
            for unit, leaves in below.items():
                selected = [path for path in leaves if selection.matches(path)]
                if len(selected) == len(leaves):
                    self._plan.keep.discard(unit)
                elif selected:
                    name = type_name(self._walk.objects[owner].target)
                    reason = (
                        f"lies inside a {name}, which takes {unit} only as a whole; name {unit}"
                    )
                    self._refused[selected[0]] = Difference(selected[0], reason=reason)
                    self._plan.keep.add(unit)

    def _compare_leaves(self) -> None:
        """Cast leaves; if the restore is not strict, find those that keep the target's value."""
        plan, found = self._plan, set()
        for path, leaf in list(plan.leaves.items()):
            owner = self._owner(path)
            if self._is_kept(path) or (owner is not None and self._parts[owner] is None):
                continue
            part = path if owner is None else nearest(path, plan.expected)
            if part not in plan.expected or (plan.expected[part] is not None and part != path):
                self._differs(self._unexpected, Difference(path, None, leaf.describe()))
                continue
            found.add(part)
            spec, stored = plan.expected[part], LeafSpec.of(leaf)
            if spec is None or spec == stored or (owner is None and fits(spec, stored)):
                continue
            line = Difference(path, spec.describe(), leaf.describe())
            if self._request.cast and spec.shape == stored.shape:
                try:
                    plan.leaves[path] = cast_leaf(leaf, spec)
                except StateError as error:
                    line = Difference(path, reason=str(error))
                    if self._request.strict:
                        self._refused[path] = line
                else:
                    reason = f"cast from {stored.dtype} to {spec.dtype}"
                    self._cast[path] = Difference(path, reason=reason)
                    continue
            self._differs(self._mismatched, line)
        for path in plan.expected.keys() - found:
            spec = plan.expected[path]
            is_part = spec is None and self._owner(path) is not None
            if is_part and path in self._stored.containers:  # an empty one
                continue
            if not self._is_kept(path):
                self._differs(
                    self._missing, Difference(path, "a value" if spec is None else spec.describe())
                )

    def _differs(self, group: dict[str, Difference], line: Difference) -> None:
        """Note a difference, unless the restore is strict: then it is an error in any case."""
        if not self._request.strict:
            group[line.path] = line

    def _compare_objects(self) -> None:
        """Keep the objects that are restored as a whole and cannot take what was stored."""
        plan = self._plan
        states = ObjectStates(plan.leaves, lambda value, _: value)
        for path, parts in self._parts.items():
            if parts is not None or self._is_kept(path):
                continue
            node = self._walk.objects[path]
            below = {
                leaf[len(path) :].removeprefix("/"): plan.leaves[leaf]
                for leaf in states.leaf_paths(path)
            }
            if path in self._refusals:
                self._mismatched[path] = Difference(path, reason=self._refusals[path])
            elif states.is_missing(node, path):
                expected = f"the state of a {type_name(node.target)}"
                self._missing[path] = Difference(path, expected)
            elif lines := self._template.objects[path](below):
                self._mismatched[path] = lines[0]._replace(path=path)
            else:
                continue
            plan.keep.add(path)

    def _keep_wholes(self) -> None:
        """Keep each optimizer, generator or masked array in which some leaf differs."""
        wholes = {branch.path for branch in self._walk.branches if _is_whole(branch.value)}
        for path in sorted(self._missing | self._unexpected | self._mismatched):
            above = [whole for whole in ancestors(path) if whole in wholes]
            if above and (whole := above[-1]) not in self._kept_whole:
                reason = f"keeps its whole state, because {path} cannot be restored"
                self._kept_whole[whole] = Difference(whole, reason=reason)
                self._plan.keep_branches.add(whole)

    def _keep_dependants(self) -> None:
        """Keep the optimizers of parameters that were not restored, and the schedulers of those."""
        live = self._values()
        live |= {path: node.target for path, node in self._walk.objects.items()}
        restored = {id(value) for path, value in live.items() if not self._is_kept(path)}
        kept = {id(live[path]): path for path in self._missing | self._mismatched if path in live}
        pending = [path for path in self._parts if not self._is_kept(path)]
        while lost := {
            path: kept[id(needed)]
            for path in pending
            for needed in self._walk.objects[path].depends_on()
            if id(needed) in kept and id(needed) not in restored
        }:
            for path, cause in lost.items():
                reason = f"keeps its whole state, because {cause} was not restored"
                self._kept_whole[path] = Difference(path, reason=reason)
                self._plan.keep.add(path)
                kept[id(live[path])] = path
                restored.discard(id(live[path]))
            pending = [path for path in pending if path not in lost]

    def _refuse_abstract(self) -> None:
        """An abstract leaf has no value to keep."""
        values = self._values()
        for path in self._asked_for(values):
            if self._is_kept(path) and _is_abstract(values[path]):
                reason = (
                    "is abstract in the target, which therefore has no value to keep, and the "
                    "checkpoint has none that fits; give the target an array there"
                )
                self._refused[path] = Difference(path, reason=reason)

    def _values(self) -> dict[str, Any]:
        """The live values of the target by path: its leaves, and the parts of its objects."""
        values = dict(self._walk.by_path)
        for path, node in self._walk.objects.items():
            values |= {join_part(path, part): value for part, value in node.part_values().items()}
        return values

    def _asked_for(self, paths: Iterable[str]) -> list[str]:
        selection = self._request.selection
        return [path for path in paths if selection is None or selection.matches(path)]


def _is_abstract(value: Any) -> bool:
    """Whether `value` is a `jax.ShapeDtypeStruct` or a tensor on the meta device."""
    return type(value).__name__ == "ShapeDtypeStruct" or getattr(value, "is_meta", False) is True


def _is_whole(value: Any) -> bool:
    """Whether `value` is the state of an optimizer (optax, Flax, Keras), a random generator or a masked
    array: half of it would be a state that no run ever had."""
    return isinstance(value, _WHOLE) or _is_optax(value) or _is_optimizer(type(value))


def _is_optax(value: Any) -> bool:
    if type(value) is tuple:  # what `optax.chain` makes
        return bool(value) and all(map(_is_optax, value))
    return type(value).__module__.partition(".")[0] == "optax"


def _is_optimizer(kind: type) -> bool:
    """By name, because a framework may not be imported."""
    return any(
        base.__name__ in ("Optimizer", "BaseOptimizer")
        and base.__module__.partition(".")[0] in ("flax", "keras")
        for base in kind.__mro__
    )
