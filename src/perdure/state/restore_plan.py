"""Plans a restore: which leaf of a checkpoint goes where, and which parts of the target stay.

Invariant: a plan changes nothing, and what a plan without `differences` restores fits the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perdure.errors import MismatchError, StateError
from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.generators import is_generator
from perdure.state.leaf_spec import Difference, LeafSpec, fits, format_differences, type_name
from perdure.state.leaf_values import cast_leaf
from perdure.state.object_restore import has_leaves
from perdure.state.paths import ancestors, join_part, nearest
from perdure.state.per_rank import current_rank_context, rank_context
from perdure.state.restore_request import RestoreReport, RestoreRequest
from perdure.state.snapshots import read_state
from perdure.state.walk import SpecsBelow, Walk, differences, leaves_of_objects, template_of
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import Container
from perdure.store.selection import Selection
from perdure.store.shard_plan import Region

Lines = dict[str, Difference]


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


class RestorePlan:
    """What a restore into a target does. All paths are paths of the target, after a rename.

    `keep` stays as it is; `expected` is what each leaf that can be restored on its own may be (None
    takes any); `sharded` decides how leaves of objects are sharded; `differences` say why it cannot
    be done, `refusals` which objects keep their state. Raises `MismatchError` if a pattern or a
    rename fits nothing.
    """

    def __init__(
        self,
        like: Any,
        leaves: Mapping[str, Leaf],
        request: RestoreRequest,
        stored: StoredState,
        refusals: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._request = request
        renaming = request.renaming
        if renaming:
            renaming.check(stored.specs, stored.containers)
            stored = StoredState(renaming.rename(stored.specs), renaming.rename(stored.containers))
        self._stored, self.specs = stored, stored.specs
        context = current_rank_context()
        with rank_context(context.index, context.count) as ranks:
            selection, containers = request.selection, stored.containers
            self.walk = Walk(like, stored.specs, selection=selection, containers=containers)
        own = renaming.rename(leaves)
        if ranks.members:  # of a `PerRank` member, only the leaves of this process are restored
            own = {path: leaf for path, leaf in own.items() if not ranks.leaves_out(path)}
        self.leaves = Leaves(own, stored.containers)
        in_shards = {path for path, leaf in own.items() if leaf.shards is not None}
        self.sharded: dict[str, Any] = {}
        if in_shards:
            values = _sharded_values(self.walk, stored.specs)
            self.sharded = {path: values[path] for path in in_shards & values.keys()}
        self._moved = sorted(
            new for path in (leaves if renaming else ()) if (new := renaming(path)) != path
        )
        self._template = template_of(self.walk)
        self.keep = self.walk.unselected | self.walk.pruned
        self.expected: dict[str, LeafSpec | None] = {}
        self._parts: dict[str, Mapping[str, LeafSpec | None] | None] = {}
        if not request.is_strict:
            self._parts = {path: node.parts() for path, node in self.walk.objects.items()}
            self.expected.update(self._template.leaves)
        for path, parts in self._parts.items():
            for part, spec in (parts or {}).items():
                self.expected[join_part(path, part)] = spec
        # A line of text for each path: the fields of the report, and what is an error in any case.
        self._missing, self._unexpected, self._mismatched = Lines(), Lines(), Lines()
        self._kept_whole, self._cast, self._refused = Lines(), Lines(), Lines()
        self.differences = self._compare(refusals)

    def report(self) -> RestoreReport:
        """How the result of this plan differs from a restore of everything."""
        cast = {path: line for path, line in self._cast.items() if not self._is_kept(path)}
        groups = (self._missing, self._unexpected, self._mismatched)
        lines = sorted(line for group in groups for line in group.values())
        text = [*self._kept_whole.values(), *lines, *cast.values()]
        selection = self._request.selection
        return RestoreReport(
            *(tuple(sorted(group)) for group in (*groups, self._kept_whole)),
            renamed=tuple(path for path in self._moved if path in self.leaves),
            cast=tuple(sorted(cast)),
            leaves=() if selection is None else selection.patterns,
            text=format_differences(text) if text else "",
        )

    def _compare(self, refusals: Mapping[str, str]) -> list[Difference]:
        request = self._request
        if request.selection is not None:
            self._check_patterns(request.selection)
            self._select_parts(request.selection)
        if request.cast or not request.strict:
            self._compare_leaves()
        if request.strict:  # then a difference is an error in any case
            self._missing, self._unexpected, self._mismatched = Lines(), Lines(), Lines()
        else:
            self.keep |= self._missing.keys() | self._mismatched.keys()
            self._keep_dependants()
            self._compare_objects(refusals)
            self._keep_wholes()
            self._keep_dependants()
            self._refuse_abstract()
        if self.keep or self._unexpected:
            self.leaves = self._without_kept()
            if not self.leaves and not request.strict:
                # A restore of nothing at all is a mistake, most likely in the names.
                for group in (self._missing, self._unexpected, self._mismatched, self._kept_whole):
                    self._refused |= group
        lines = {line.path: line for line in differences(self._template, self.leaves)}
        lines |= {line.path: line for line in _misplaced(self.walk.by_path)}
        if self.keep or request.selection is not None:
            lines = {
                path: line
                for path, line in lines.items()
                if not self._is_kept(path) and not self._is_left_out(path)
            }
        return sorted((lines | self._refused).values())

    def _without_kept(self) -> Leaves:
        leaves = {p: leaf for p, leaf in self.leaves.items() if p not in self._unexpected}
        containers = {p: e for p, e in self.leaves.containers.items() if self._has_place(p)}
        return Leaves(
            {path: leaf for path, leaf in leaves.items() if not self._is_kept(path)},
            {path: entry for path, entry in containers.items() if not self._is_kept(path)},
        )

    def _has_place(self, path: str) -> bool:
        """Whether the container at `path` is that of an object, or in a part that a module has."""
        owner = self._owner(path)
        if self._request.strict or owner is None or self._parts[owner] is None:
            return True
        return path == owner or nearest(path, self.expected) is not None

    def _is_kept(self, path: str) -> bool:
        return nearest(path, self.keep) is not None

    def _is_left_out(self, path: str) -> bool:
        """Whether `path` is a tensor of a module that is never saved, and was not asked for."""
        selection, owner = self._request.selection, self._owner(path)
        if selection is None or owner is None or self._parts[owner] is None:
            return False
        return path not in self.expected and not selection.matches(path)

    def _owner(self, path: str) -> str | None:
        return nearest(path, self._parts)

    def _check_patterns(self, selection: Selection) -> None:
        strict = self._request.strict
        inside = [path for path in self.specs if self._owner(path) is not None]
        not_in_target = selection.unused([*self.expected, *self._parts, *inside])
        not_stored = selection.unused([*self.specs, *self._stored.containers])
        for pattern in not_in_target:
            if strict or pattern in not_stored:
                raise MismatchError(
                    f"{pattern}: the target has no such leaf or branch; nothing was changed. An object "
                    f"with `load_state_dict` that is no module (an optimizer) is restored as a whole."
                )
        # A run resumes with members of its own: one without any leaf there, such as a metric, is its
        # attributes, and one that lacks leaves is found with the other differences.
        if strict and not_stored and not self._request.resumes:
            raise MismatchError(
                f"{not_stored[0]}: the checkpoint has no such leaf or branch; nothing was changed."
            )

    def _select_parts(self, selection: Selection) -> None:
        """Keep the values of modules that are not selected; refuse parts of an object without parts."""
        for owner, parts in self._parts.items():
            if selection.matches(owner):
                continue
            units = {owner} if parts is None else {join_part(owner, part) for part in parts}
            if parts is not None:
                self.keep |= {unit for unit in units if not selection.matches(unit)}
            by_unit: dict[str, list[str]] = {}
            for path in self.specs:
                unit = nearest(path, units) if self._owner(path) == owner else None
                if unit is not None and unit != path:
                    by_unit.setdefault(unit, []).append(path)
            for unit, leaves in by_unit.items():
                selected = [path for path in leaves if selection.matches(path)]
                if len(selected) == len(leaves):
                    self.keep.discard(unit)
                elif selected:
                    name = type_name(self.walk.objects[owner].target)
                    reason = (
                        f"lies inside a {name}, which takes {unit} only as a whole; name {unit}"
                    )
                    self._refused[selected[0]] = Difference(selected[0], reason=reason)
                    self.keep.add(unit)

    def _compare_leaves(self) -> None:
        """Cast leaves; if the restore is not strict, find leaves that keep the target's value."""
        request, found = self._request, set[str]()
        for path, leaf in list(self.leaves.items()):
            owner = self._owner(path)
            if self._is_kept(path) or (owner is not None and self._parts[owner] is None):
                continue
            part = path if owner is None else nearest(path, self.expected)
            if part not in self.expected or (self.expected[part] is not None and part != path):
                self._unexpected[path] = Difference(path, None, leaf.describe())
                continue
            found.add(part)
            spec, stored = self.expected[part], LeafSpec.of(leaf)
            if spec is None or spec == stored or (owner is None and fits(spec, stored)):
                continue
            line = Difference(path, spec.describe(), leaf.describe())
            if request.cast and spec.shape == stored.shape:
                try:
                    self.leaves[path] = cast_leaf(leaf, spec)
                except StateError as error:
                    line = Difference(path, reason=str(error))
                    if request.strict:
                        self._refused[path] = line
                else:
                    reason = f"cast from {stored.dtype} to {spec.dtype}"
                    self._cast[path] = Difference(path, reason=reason)
                    continue
            self._mismatched[path] = line
        for path in self.expected.keys() - found:
            spec = self.expected[path]
            is_part = spec is None and self._owner(path) is not None
            is_empty = is_part and path in self._stored.containers
            if not is_empty and not self._is_kept(path):
                text = "a value" if spec is None else spec.describe()
                self._missing[path] = Difference(path, text)

    def _compare_objects(self, refusals: Mapping[str, str]) -> None:
        """Keep the objects that are restored as a whole and cannot take what was stored."""
        objects = [path for path, parts in self._parts.items() if parts is None]
        inside, _ = leaves_of_objects(objects, self.leaves)
        for path in objects:
            if self._is_kept(path):
                continue
            node, stored = self.walk.objects[path], inside[path]
            is_stored = stored or stored.containers
            if path in refusals:
                self._mismatched[path] = Difference(path, reason=refusals[path])
            elif not is_stored and has_leaves(read_state(node, path)):
                self._missing[path] = Difference(path, f"the state of a {type_name(node.target)}")
            elif lines := self._template.objects[path](stored):
                self._mismatched[path] = lines[0]._replace(path=path)
            else:
                continue
            self.keep.add(path)

    def _keep_wholes(self) -> None:
        """Keep each optimizer, generator or masked array in which some leaf differs."""
        wholes = {branch.path for branch in self.walk.branches if _is_whole(branch.value)}
        for path in sorted(self._missing | self._unexpected | self._mismatched):
            above = [whole for whole in ancestors(path) if whole in wholes]
            if above and above[-1] not in self._kept_whole:
                self._keep_whole(above[-1], f"{path} cannot be restored")

    def _keep_dependants(self) -> None:
        """Keep the optimizers of parameters that were not restored, and their schedulers."""
        live = self._values() | self.walk.targets
        restored = {id(value) for path, value in live.items() if not self._is_kept(path)}
        kept = {id(live[path]): path for path in self._missing | self._mismatched if path in live}
        pending = [path for path in self._parts if not self._is_kept(path)]
        while lost := {
            path: kept[id(needed)]
            for path in pending
            for needed in self.walk.objects[path].depends_on()
            if id(needed) in kept and id(needed) not in restored
        }:
            for path, cause in lost.items():
                self._keep_whole(path, f"{cause} was not restored")
                kept[id(live[path])] = path
                restored.discard(id(live[path]))
            pending = [path for path in pending if path not in lost]

    def _keep_whole(self, path: str, cause: str) -> None:
        reason = f"keeps its whole state, because {cause}"
        self._kept_whole[path] = Difference(path, reason=reason)
        self.keep.add(path)

    def _refuse_abstract(self) -> None:
        """An abstract leaf has no value to keep."""
        selection = self._request.selection
        for path, value in self._values().items():
            is_asked = selection is None or selection.matches(path)
            is_abstract = type(value).__name__ == "ShapeDtypeStruct" or (
                getattr(value, "is_meta", False) is True
            )
            if is_asked and is_abstract and self._is_kept(path):
                reason = "is abstract, and the checkpoint has no value that fits; give it an array"
                self._refused[path] = Difference(path, reason=reason)

    def _values(self) -> dict[str, Any]:
        """The live values of the target by path: its leaves, and the parts of its objects."""
        values = dict(self.walk.by_path)
        for path, node in self.walk.objects.items():
            values |= {join_part(path, part): value for part, value in node.part_values().items()}
        return values


def needed_regions(
    like: Any, request: RestoreRequest, stored: Mapping[str, LeafSpec]
) -> dict[str, tuple[Region, ...]]:
    """The elements that this process needs of arrays that it does not need whole, by path in the
    checkpoint. Empty if the target does not fit: the restore then says why."""
    adapters = [each for each in loaded_adapters() if type(each).regions is not Adapter.regions]
    if not adapters:
        return {}
    specs = request.renaming.rename(stored)
    context = current_rank_context()
    try:
        with rank_context(context.index, context.count):
            values = _sharded_values(Walk(like, specs, selection=request.selection), specs)
        found = {}
        for path, spec in stored.items():
            target = values.get(request.renaming(path))
            if target is not None and tuple(getattr(target, "shape", ())) == spec.shape:
                for adapter in adapters:
                    if (regions := adapter.regions(target)) is not None:
                        found[path] = regions
    except StateError:
        return {}
    return found


def _sharded_values(walk: Walk, specs: Mapping[str, LeafSpec]) -> dict[str, Any]:
    """The values of a target by path, and the sharded arrays inside its objects."""
    values = dict(walk.by_path)
    for path, node in walk.objects.items():
        inside = node.sharded_values(SpecsBelow(specs, path))
        values |= {join_part(path, part): value for part, value in inside.items()}
    return values


def _misplaced(values: Mapping[str, Any]) -> Iterator[Difference]:
    for adapter in loaded_adapters():
        if type(adapter).misplaced is not Adapter.misplaced:
            for path, value in values.items():
                if reason := adapter.misplaced(value):
                    yield Difference(path, reason=reason)


def _is_whole(value: Any) -> bool:
    """Whether `value` is the state of an optimizer (optax, Flax, Keras), a random generator or a masked
    array: half of it would be a state that no run ever had."""
    if isinstance(value, np.ma.MaskedArray) or is_generator(value) or _is_optax(value):
        return True
    libraries = ("flax.", "keras.")  # by name: maybe not imported
    return any(
        base.__name__ in ("Optimizer", "BaseOptimizer") and base.__module__.startswith(libraries)
        for base in type(value).__mro__
    )


def _is_optax(value: Any) -> bool:
    if type(value) is tuple:  # what `optax.chain` makes
        return bool(value) and all(map(_is_optax, value))
    return type(value).__module__.partition(".")[0] == "optax"
