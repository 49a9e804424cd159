"""Restores the leaves below some paths of a target, and keeps the rest of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perdure.errors import ArgumentError, MismatchError
from perdure.state.adapter import Node, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.paths import insert, join_key, lookup, split_path
from perdure.state.tree_restore import restore
from perdure.store.leaf import Leaf


def part_names(leaves: str | Iterable[str]) -> tuple[str, ...]:
    """The paths in `leaves` (one path or several), without those that lie below another one.

    Raises:
        ArgumentError: there is no path, or one is no non-empty string.
    """
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
    """A function that says whether a leaf path is one of `names` or lies below one."""
    prefixes = tuple(f"{name}/" for name in names)
    return lambda path: path in names or path.startswith(prefixes)


def restore_part(like: Any, leaves: Mapping[str, Leaf], names: tuple[str, ...]) -> Any:
    """`like` with the bits of `leaves` below the paths `names`; everything else is kept.

    Args:
        like: the whole target.
        leaves: the leaves of the checkpoint below `names`, by path.
        names: paths of leaves or branches, as `part_names` returns them.

    Raises:
        MismatchError: `like` or `leaves` lacks one of `names`, or the parts differ. Nothing has been
            changed then.
    """
    parts: dict[str, Any] = {}
    for name in names:
        branch = _find(like, "", name)
        if branch is None:
            raise MismatchError(
                f"{name}: the target has no such leaf or branch; nothing was changed. An object "
                f"with `load_state_dict` (a module, an optimizer) is restored as a whole."
            )
        if not any(map(part_filter((name,)), leaves)):
            raise MismatchError(
                f"{name}: the checkpoint has no such leaf or branch; nothing was changed."
            )
        insert(parts, split_path(name), branch[0])
    restored = restore(parts, leaves)
    for name in names:
        old, new = _find(like, "", name), lookup(restored, split_path(name))
        if old is not None and old[0] is not new:
            like = _replace(like, "", name, new)
    return like


def _find(value: Any, path: str, name: str) -> tuple[Any] | None:
    """The value at the path `name` in `value`, which itself is at `path`; None if there is none."""
    if path == name:
        return (value,)
    for key, child in _children(value, path):
        child_path = join_key(path, key)
        if _may_hold(child_path, path, name) and (branch := _find(child, child_path, name)):
            return branch
    return None


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    """The children of a node; none for a leaf or for an object that is restored as a whole."""
    adapters = loaded_adapters()
    if leaf_adapter(value, adapters) is not None:
        return []
    node = node_of(value, path, adapters, None)
    return node.children if isinstance(node, Node) else []


def _replace(value: Any, path: str, name: str, new: Any) -> Any:
    if path == name:
        return new
    node = node_of(value, path, loaded_adapters(), None)
    assert isinstance(node, Node)
    children = []
    for key, child in node.children:
        child_path = join_key(path, key)
        if _may_hold(child_path, path, name) and _find(child, child_path, name):
            child = _replace(child, child_path, name, new)
        children.append(child)
    rebuilt = node.rebuild(children)
    return value if node.in_place else rebuilt


def _may_hold(child_path: str, parent: str, name: str) -> bool:
    """Whether the path `name` can be in the child at `child_path`, which is `parent` if its key is
    empty."""
    return child_path in (name, parent) or name.startswith(f"{child_path}/")
