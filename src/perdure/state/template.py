"""What a restore target can take, kept as names, dtypes and shapes, and compared with leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.errors import MismatchError
from perdure.state.adapter import Adapter, Check, Difference, Spec, Stateful
from perdure.state.builtin import is_plain
from perdure.state.walk import Named, adapters, join, leaf_adapter, nested_too_deeply, node_of
from perdure.store.leaf import Leaf

MOST_LINES = 20


@dataclass(frozen=True)
class Template:
    """The leaves of a target, and what its objects with `load_state_dict` check. Holds no array."""

    leaves: dict[str, Spec] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    """The paths of NumPy arrays and of numbers: a run may put arrays of a framework there."""

    objects: dict[str, Check] = field(default_factory=dict)


def template_of(like: Any, stored: Mapping[str, Spec] | None = None, path: str = "") -> Template:
    """The template of a target at `path` of a state; `stored` has the specs of a checkpoint."""
    template = Template()
    try:
        _describe(like, path, adapters(), stored, template)
    except RecursionError:
        raise nested_too_deeply() from None
    return template


def differences(template: Template, leaves: Mapping[str, Leaf]) -> list[Difference]:
    """Every path at which the leaves do not fit, in path order.

    An object with `load_state_dict` takes whatever leaves it has in the checkpoint, apart from what
    its own check refuses.
    """
    found = {path: Spec.of(leaf) for path, leaf in leaves.items()}
    lines: list[Difference] = []
    if template.objects:
        below: dict[str, dict[str, Leaf]] = {at: {} for at in template.objects}
        for path, leaf in leaves.items():
            if (at := _object_above(path, below)) is not None:
                below[at][path[len(at) :].removeprefix("/")] = leaf
                del found[path]
        for at, check in template.objects.items():
            lines += [
                line._replace(path="/".join(filter(None, (at, line.path))))
                for line in check(below[at])
            ]
    wanted = template.leaves
    if wanted != found:
        for path in wanted.keys() | found.keys():
            spec, stored = wanted.get(path), found.get(path)
            if spec is None or stored is None or not fits(spec, stored):
                lines.append(
                    Difference(path, spec and spec.describe(), stored and stored.describe())
                )
    return sorted(lines, key=lambda line: line.path)


def fits(wanted: Spec, found: Spec) -> bool:
    """Whether a stored leaf can take a place in a target.

    Equal, or both of them Python scalars, or a number of Python's where the checkpoint has a
    zero-dimensional array of that kind: a counter that starts as `0` comes out of the first compiled
    step as an array.
    """
    kinds = {"py:int": ("int", "uint"), "py:float": ("float", "bfloat"), "py:bool": ("bool",)}
    return (
        wanted == found
        or (wanted.dtype.startswith("py:") and found.dtype.startswith("py:"))
        or (found.shape == () and found.dtype.startswith(kinds.get(wanted.dtype, ("/",))))
    )


def mismatch(lines: Sequence[Difference], advice: str) -> MismatchError:
    """The error that lists differences."""
    leaves = "leaf" if len(lines) == 1 else "leaves"
    return MismatchError(
        f"the target and the checkpoint differ in {len(lines):,} {leaves}; nothing was changed:\n"
        f"{listed(lines)}\n{advice}"
    )


def listed(lines: Sequence[Difference]) -> str:
    """The differences, one to a line: at most MOST_LINES, or one line if a prefix explains them all."""
    if (prefix := _common_prefix(lines)) is not None:
        return f"  {prefix}"
    shown = [f"  {line}" for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"  and {len(lines) - MOST_LINES:,} more")
    return "\n".join(shown)


def _common_prefix(lines: Sequence[Difference]) -> str | None:
    """One sentence, if the paths of one side are those of the other with something put in."""
    target = sorted(line.path.split("/") for line in lines if line.found is None)
    stored = sorted(line.path.split("/") for line in lines if line.wanted is None)
    if any(line.reason for line in lines) or len(target) < 2 or len(target) != len(stored):
        return None
    if 2 * len(target) != len(lines):
        return None
    for shorter, longer, side in (
        (target, stored, "only the checkpoint has"),
        (stored, target, "only the target has"),
    ):
        more = len(longer[0]) - len(shorter[0])
        for at in range(len(shorter[0])):
            added = longer[0][at : at + more]
            if more > 0 and longer == sorted([*path[:at], *added, *path[at:]] for path in shorter):
                prefix = "/".join(added)
                where = f" after `{'/'.join(shorter[0][:at])}/`" if at else ""
                example = f"`{'/'.join(longer[0])}` and `{'/'.join(shorter[0])}`"
                return (
                    f"all {len(target):,} leaves differ by the prefix `{prefix}/`{where}, which "
                    f"{side}: {example}"
                )
    return None


def _object_above(path: str, objects: Mapping[str, object]) -> str | None:
    at = path
    while at not in objects:
        if not at:
            return None
        at = at.rpartition("/")[0]
    return at


def _describe(
    value: Any,
    path: str,
    among: Sequence[Adapter],
    stored: Mapping[str, Spec] | None,
    template: Template,
) -> None:
    with Named(path):
        if (leaf := leaf_adapter(value, among)) is not None:
            template.leaves[path] = leaf[1]
            if is_plain(value):
                template.plain.add(path)
            return
        node = node_of(value, path, among, stored)
    if isinstance(node, Stateful):
        template.objects[path] = node.check()
        return
    for key, child in node.children:
        _describe(child, join(path, key), among, stored, template)
