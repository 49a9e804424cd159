"""What a restore target can take: its dtypes and shapes by path, and a comparison with leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import attrgetter, eq
from typing import Any

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.leaf_errors import add_path, nested_too_deeply
from perdure.state.leaf_spec import Check, Difference, LeafSpec, fits
from perdure.state.paths import TOGETHER, join_keys, join_part, nearest
from perdure.state.stateful import Stateful
from perdure.state.wholes import is_whole
from perdure.store.json_blocks import blocks
from perdure.store.leaf import Leaf, containers_of
from perdure.store.selection import Selection

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


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


def template_of(like: Any, stored: Mapping[str, LeafSpec] | None = None) -> Template:
    """The template of a target.

    Args:
        like: the target.
        stored: the specs of the checkpoint by path, for values whose structure depends on what was
            stored; None if there is no checkpoint yet.

    Raises:
        UnsupportedLeafError: a value cannot be restored exactly.
    """
    return TargetWalk(like, stored).template


class TargetWalk:
    """The template of a target, and for as long as a restore takes, its values.

    Args:
        like, stored: as for `template_of`.
        path: the path of `like` in its state.
        selection: what to restore. Other branches are not entered, so that they may hold anything.

    Attributes:
        template: the part of the target that is selected.
        objects: the objects with `load_state_dict` by path.
        wholes: the paths of values that a restore replaces as a whole or not at all.
        unselected: the paths of leaves and objects that are not selected.
        pruned: the paths of the branches that were not entered.
    """

    def __init__(
        self,
        like: Any,
        stored: Mapping[str, LeafSpec] | None,
        path: str = "",
        selection: Selection | None = None,
    ) -> None:
        self.template = Template()
        self.objects: dict[str, Stateful] = {}
        self.wholes: set[str] = set()
        self.unselected: set[str] = set()
        self.pruned: set[str] = set()
        self._stored = stored
        self._selection = selection
        self._adapters = loaded_adapters()
        self._takers: dict[type, Adapter] = {}
        self._values: list[Any] = []
        try:
            self._visit(like, path)
        except RecursionError:
            raise nested_too_deeply() from None

    @cached_property
    def values(self) -> dict[str, Any]:
        """The leaves by path."""
        return dict(self.pairs())

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """Path and value of each leaf."""
        return zip(self.template.paths, self._values, strict=True)

    def _visit(self, value: Any, path: str) -> None:
        selection = self._selection
        is_selected = selection is None or selection.matches(path)
        if not is_selected and not self._may_hold(path):
            self.pruned.add(path)
            return
        try:
            if (spec := self._spec(value)) is not None:
                if is_selected:
                    self._add_leaves([path], [spec], [value])
                else:
                    self.unselected.add(path)
                return
            node = node_of(value, path, self._adapters, self._stored)
        except StateError as error:
            add_path(error, path)
            if is_selected or not isinstance(error, UnsupportedLeafError):
                raise
            self.pruned.add(path)
            return
        if isinstance(node, Stateful):
            if is_selected or self._selects_inside(node, path):
                self.template.objects[path] = node.check()
                self.objects[path] = node
            else:
                self.unselected.add(path)
            return
        if is_whole(value):
            self.wholes.add(path)
        self._visit_children(node.children, path)

    def _visit_children(self, children: Iterable[tuple[str, Any]], path: str) -> None:
        takers = self._takers if self._selection is None else {}
        for block in blocks(children, TOGETHER):
            keys, values = zip(*block, strict=True)
            paths = join_keys(path, keys)
            # There may be very many leaves of a type that was met before.
            taker = takers.get(type(values[0]))
            if taker is not None and (specs := taker.specs(values)) is not None:
                self._add_leaves(paths, specs, values)
                continue
            for child_path, child in zip(paths, values, strict=True):
                self._visit(child, child_path)

    def _add_leaves(
        self, paths: Sequence[str], specs: Sequence[LeafSpec], values: Sequence[Any]
    ) -> None:
        self.template.paths.extend(paths)
        self.template.specs.extend(specs)
        self._values.extend(values)

    def _spec(self, value: Any) -> LeafSpec | None:
        """dtype and shape of a leaf; None for an interior value."""
        kind = type(value)
        spec = self._takers[kind].spec(value) if kind in self._takers else None
        if spec is None and (found := leaf_adapter(value, self._adapters)) is not None:
            self._takers[kind], spec = found
        return spec

    def _may_hold(self, path: str) -> bool:
        return self._selection is None or self._selection.may_hold(path)

    def _selects_inside(self, node: Stateful, path: str) -> bool:
        """Whether something inside an object is selected: in the checkpoint, or in the target."""
        assert self._selection is not None
        below = f"{path}/" if path else ""
        inside = [leaf for leaf in self._stored or () if leaf.startswith(below)]
        inside += [join_part(path, part) for part in node.parts() or ()]
        return any(map(self._selection.matches, inside))


class _Comparison(TargetWalk):
    """Compares the leaves of a state with others as it meets them, and keeps nothing of them."""

    def __init__(self, state: Any, leaves: Mapping[str, Leaf]) -> None:
        self.is_same = True
        self._expected = iter(leaves.items())
        super().__init__(state, None)
        self.is_same &= not self.template.objects and next(self._expected, None) is None

    def _add_leaves(
        self, paths: Sequence[str], specs: Sequence[LeafSpec], values: Sequence[Any]
    ) -> None:
        if self.is_same:
            expected = dict(islice(self._expected, len(paths)))
            self.is_same = same_specs(paths, specs, expected)


def same_specs(
    paths: Collection[str], specs: Collection[LeafSpec], leaves: Mapping[str, Leaf]
) -> bool:
    """Whether leaves have these paths, in this order, and these dtypes and shapes.

    It looks up no path, because there may be very many, and takes no line of Python for each.
    """
    return (
        len(paths) == len(leaves)
        and all(map(eq, paths, leaves))
        and all(map(eq, map(_DTYPE, specs), map(_DTYPE, leaves.values())))
        and all(map(eq, map(_SHAPE, specs), map(_SHAPE, leaves.values())))
    )


def differences(template: Template, leaves: Mapping[str, Leaf]) -> list[Difference]:
    """Every path at which the leaves do not fit the template, sorted by path.

    An object with `load_state_dict` takes any leaves, except those that its own check refuses.
    """
    if not template.objects and same_specs(template.paths, template.specs, leaves):
        return []
    missing = dict(template.leaves)
    lines: list[Difference] = []
    object_leaves: dict[str, dict[str, Leaf]] = {path: {} for path in template.objects}
    for path, leaf in leaves.items():
        if object_leaves and (parent := nearest(path, object_leaves)) is not None:
            object_leaves[parent][path[len(parent) :].removeprefix("/")] = leaf
            continue
        expected = missing.pop(path, None)
        if expected is None or (expected.dtype, expected.shape) != (leaf.dtype, leaf.shape):
            present = LeafSpec.of(leaf)
            if expected is None or not fits(expected, present):
                text = expected and expected.describe()
                lines.append(Difference(path, text, present.describe()))
    lines += [Difference(path, spec.describe()) for path, spec in missing.items()]
    for parent, check in template.objects.items():
        lines += [
            line._replace(path=join_part(parent, line.path) if line.path else parent)
            for line in check(object_leaves[parent])
        ]
    return sorted(lines, key=lambda line: line.path)


def own_differences(state: Any, leaves: Mapping[str, Leaf]) -> list[Difference]:
    """`differences` between a state as a target and the leaves that were made of it."""
    # There may be very many leaves, and nearly always all of them fit: no template is needed then.
    if not containers_of(leaves) and _Comparison(state, leaves).is_same:
        return []
    return differences(template_of(state), leaves)
