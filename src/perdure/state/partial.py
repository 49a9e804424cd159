"""A part of a state: the leaves below some paths, restored into a target that keeps all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perdure.errors import ArgumentError, MismatchError
from perdure.state.adapter import Node
from perdure.state.tree import put, restore
from perdure.state.walk import adapters, join, leaf_adapter, node_of
from perdure.store.format import unescape
from perdure.store.leaf import Leaf


def part_names(leaves: str | Iterable[str]) -> tuple[str, ...]:
    """The paths in `leaves`, without those that lie below another one."""
    several = isinstance(leaves, Iterable) and not isinstance(leaves, str)
    names: tuple[Any, ...] = tuple(leaves) if several else (leaves,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(
            f"leaves: expected the path of a leaf or of a branch, or several, found {leaves!r}."
        )
    return tuple(
        name
        for name in dict.fromkeys(names)
        if not any(name.startswith(f"{other}/") for other in names)
    )


def part_filter(names: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a leaf path is one of `names` or lies below one."""
    below = tuple(f"{name}/" for name in names)
    return lambda path: path in names or path.startswith(below)


def restore_part(like: Any, leaves: Mapping[str, Leaf], names: tuple[str, ...]) -> Any:
    """`like` with the bits of `leaves` below the paths `names`, and everything else as it is.

    Raises `MismatchError` if `like` or `leaves` lacks one of `names`, or the parts differ; nothing has
    been changed then.
    """
    parts: dict[str, Any] = {}
    for name in names:
        found = _find(like, "", name)
        if found is None:
            raise MismatchError(
                f"{name}: the target has no such leaf or branch; nothing was changed. An object "
                f"with `load_state_dict` (a module, an optimizer) is restored as a whole."
            )
        if not any(map(part_filter((name,)), leaves)):
            raise MismatchError(
                f"{name}: the checkpoint has no such leaf or branch; nothing was changed."
            )
        put(parts, name, found[0])
    restored = restore(parts, leaves)
    for name in names:
        old, new = _find(like, "", name), _get(restored, name)
        if old is not None and old[0] is not new:
            like = _replace(like, "", name, new)
    return like


def _find(value: Any, path: str, name: str) -> tuple[Any] | None:
    """The value at the path `name` in `value`, which itself lies at `path`; None if there is none."""
    if path == name:
        return (value,)
    for key, child in _children(value, path):
        at = join(path, key)
        if _may_hold(at, path, name) and (found := _find(child, at, name)):
            return found
    return None


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    """What a value holds; nothing for a leaf, and for an object that is restored as a whole."""
    among = adapters()
    if leaf_adapter(value, among) is not None:
        return []
    node = node_of(value, path, among, None)
    return node.children if isinstance(node, Node) else []


def _replace(value: Any, path: str, name: str, new: Any) -> Any:
    if path == name:
        return new
    node = node_of(value, path, adapters(), None)
    assert isinstance(node, Node)
    children = []
    for key, child in node.children:
        at = join(path, key)
        if _may_hold(at, path, name) and _find(child, at, name):
            child = _replace(child, at, name, new)
        children.append(child)
    rebuilt = node.rebuild(children)
    return value if node.in_place else rebuilt


def _may_hold(at: str, parent: str, name: str) -> bool:
    """Whether the path `name` can lie in the child at `at`; one without a key adds nothing to it."""
    return at in (name, parent) or name.startswith(f"{at}/")


def _get(parts: Any, name: str) -> Any:
    for key in name.split("/"):
        parts = parts[unescape(key)]
    return parts
