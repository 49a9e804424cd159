"""Trees of plain containers, for a framework that has none.

Containers are dict (by key), list, tuple and NamedTuple; None is empty; everything else is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

_TREE_NODES = (dict, list, tuple)


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf with its path, such as "grads/0/bias"."""
    if value is None:
        return []
    named = children(value)
    if named is None:
        return [(path, value)]
    return [
        leaf
        for name, child in named
        for leaf in flatten(child, f"{path}/{name}" if path else str(name))
    ]


def leaves_and_structure(value: Any) -> tuple[list[Any], Hashable]:
    """The leaves, in the order of `flatten`, and what is equal for equal containers and names."""
    if not isinstance(value, _TREE_NODES):
        return ([], None) if value is None else ([value], "leaf")
    leaves: list[Any] = []
    return leaves, _structure(value, leaves)


# These call themselves for containers only: a call for each leaf would take half of their time.
def _structure(value: Any, leaves: list[Any]) -> Hashable:
    names, values = _entries(value)
    parts: list[Hashable] = []
    for child in values:
        if isinstance(child, _TREE_NODES):
            parts.append(_structure(child, leaves))
        elif child is None:
            parts.append(None)
        else:
            leaves.append(child)
            parts.append("leaf")
    return type(value).__name__, tuple(names), tuple(parts)


def leaves(value: Any) -> list[Any]:
    """The leaves, in the order of `flatten`."""
    return leaves_and_structure(value)[0]


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """The containers of `value` around new leaves, in the order of `flatten`."""
    if not isinstance(value, _TREE_NODES):
        return None if value is None else next(leaves)
    names, values = _entries(value)
    new = [
        rebuild(child, leaves)
        if isinstance(child, _TREE_NODES)
        else (None if child is None else next(leaves))
        for child in values
    ]
    return _around(value, names, new)


def transform(fn: Callable[[Any], Any], value: Any) -> Any:
    """`fn` of every leaf, in the same containers; unsorted, in a quarter of the time of `rebuild`."""
    if not isinstance(value, _TREE_NODES):
        return None if value is None else fn(value)
    new = [
        transform(fn, child)
        if isinstance(child, _TREE_NODES)
        else (None if child is None else fn(child))
        for child in (value.values() if isinstance(value, dict) else value)
    ]
    return (
        dict(zip(value, new, strict=True)) if isinstance(value, dict) else _around(value, (), new)
    )


def _around(value: Any, names: Sequence[Any], new: list[Any]) -> Any:
    if isinstance(value, dict):
        by_name = dict(zip(names, new, strict=True))
        return by_name if list(value) == names else {name: by_name[name] for name in value}
    if type(value) is list:
        return new
    if hasattr(value, "_fields"):
        return type(value)(*new)
    return type(value)(new)


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """(name, child) of a container, in the fixed order; None for a leaf."""
    return list(zip(*_entries(value), strict=True)) if isinstance(value, _TREE_NODES) else None


def _entries(value: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The names and the children of a container."""
    if isinstance(value, dict):
        names = sorted(value, key=str)
        return names, [value[name] for name in names]
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)) is not None:
        return fields, value
    return range(len(value)), value
