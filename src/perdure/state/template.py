"""What a restore target can take: its dtypes and shapes by path, and a comparison with leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.leaf_errors import PathInErrors, nested_too_deeply
from perdure.state.leaf_spec import Check, Difference, LeafSpec, fits
from perdure.state.leaf_values import is_plain
from perdure.state.paths import join_key, join_part
from perdure.state.stateful import Stateful
from perdure.store.leaf import Leaf


@dataclass(frozen=True)
class Template:
    """The leaves of a target, and the checks of its objects with `load_state_dict`. Holds no array."""

    leaves: dict[str, LeafSpec] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    """The paths of NumPy arrays and numbers: a run may replace them by arrays of a framework."""

    objects: dict[str, Check] = field(default_factory=dict)


def template_of(
    like: Any, stored: Mapping[str, LeafSpec] | None = None, path: str = ""
) -> Template:
    """The template of a target.

    Args:
        like: the target.
        stored: the specs of the checkpoint by path, for values whose structure depends on what was
            stored; None if there is no checkpoint yet.
        path: the path of `like` in its state.

    Raises:
        UnsupportedLeafError: a value cannot be restored exactly.
    """
    template = Template()
    try:
        _describe(like, path, loaded_adapters(), stored, template)
    except RecursionError:
        raise nested_too_deeply() from None
    return template


def differences(template: Template, leaves: Mapping[str, Leaf]) -> list[Difference]:
    """Every path at which the leaves do not fit the template, sorted by path.

    An object with `load_state_dict` takes any leaves, except those that its own check refuses.
    """
    stored = {path: LeafSpec.of(leaf) for path, leaf in leaves.items()}
    lines: list[Difference] = []
    if template.objects:
        object_leaves: dict[str, dict[str, Leaf]] = {path: {} for path in template.objects}
        for path, leaf in leaves.items():
            if (parent := _object_above(path, object_leaves)) is not None:
                object_leaves[parent][path[len(parent) :].removeprefix("/")] = leaf
                del stored[path]
        for parent, check in template.objects.items():
            lines += [
                line._replace(path=join_part(parent, line.path) if line.path else parent)
                for line in check(object_leaves[parent])
            ]
    if template.leaves != stored:
        for path in template.leaves.keys() | stored.keys():
            expected, present = template.leaves.get(path), stored.get(path)
            if expected is None or present is None or not fits(expected, present):
                lines.append(
                    Difference(
                        path, expected and expected.describe(), present and present.describe()
                    )
                )
    return sorted(lines, key=lambda line: line.path)


def _object_above(path: str, objects: Mapping[str, object]) -> str | None:
    """The path of the object that the leaf at `path` belongs to; None if it belongs to none."""
    while path not in objects:
        if not path:
            return None
        path = path.rpartition("/")[0]
    return path


def _describe(
    value: Any,
    path: str,
    adapters: Sequence[Adapter],
    stored: Mapping[str, LeafSpec] | None,
    template: Template,
) -> None:
    with PathInErrors(path):
        if (leaf := leaf_adapter(value, adapters)) is not None:
            template.leaves[path] = leaf[1]
            if is_plain(value):
                template.plain.add(path)
            return
        node = node_of(value, path, adapters, stored)
    if isinstance(node, Stateful):
        template.objects[path] = node.check()
        return
    for key, child in node.children:
        _describe(child, join_key(path, key), adapters, stored, template)
