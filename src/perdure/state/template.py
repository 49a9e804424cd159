"""What a restore target can take: its dtypes and shapes by path, and a comparison with leaves."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, eq
from typing import Any

from perdure.state.adapter import adapter
from perdure.state.leaf_spec import Check, Difference, LeafSpec, fits
from perdure.state.leaf_values import plain_value
from perdure.state.paths import below, join_part, nearest, nested
from perdure.state.walk import Walk
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.manifest import LeafEntry

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


def template_of(like: Any) -> Template:
    """The template of a target, or of the target that was walked."""
    walk = like if isinstance(like, Walk) else Walk(like)
    checks = {path: node.check() for path, node in walk.objects.items()}
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
    object_leaves = {
        path: Leaves({}, {"": containers[path]} if path in containers else {})
        for path in template.objects
    }
    for path, leaf in leaves.items():
        if object_leaves and (parent := nearest(path, object_leaves)) is not None:
            object_leaves[parent][below(path, parent)] = leaf
            continue
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
            line._replace(path=join_part(parent, line.path) if line.path else parent)
            for line in check(object_leaves[parent])
        ]
    return sorted(lines, key=lambda line: line.path)


def metadata_tree(entries: Iterable[LeafEntry]) -> Any:
    """Nested dicts of `jax.ShapeDtypeStruct` (without JAX: `LeafSpec`) and Python scalars."""
    return nested((entry.path, _describe(entry)) for entry in entries)


def _describe(entry: LeafEntry) -> Any:
    if entry.text is not None:
        return plain_value(Leaf(entry.dtype, (), memoryview(entry.text.encode())))
    spec = LeafSpec.of(entry)
    if "jax" not in sys.modules:
        return spec
    jax: Any = adapter("jax")
    return jax.abstract(spec, is_weak=entry.dtype.startswith(WEAK_PREFIX))
