"""Trees of plain containers, for a framework that has none.

Containers are dict, list, tuple and NamedTuple; None is an empty container; everything else is a leaf.
Leaves come in a fixed order, dict entries by key and the others by position. Rebuilding keeps the types
of the containers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any


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


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """The containers of `value` around new leaves, in the order of `flatten`."""
    if value is None:
        return None
    named = children(value)
    if named is None:
        return next(leaves)
    return remake(value, {name: rebuild(child, leaves) for name, child in named})


def remake(value: Any, new: dict[Any, Any]) -> Any:
    """A container like `value` around new children, given by name."""
    if isinstance(value, dict):
        return {name: new[name] for name in value}
    if hasattr(value, "_fields"):
        return type(value)(**new)
    return type(value)(new.values())


def transform(fn: Callable[[Any], Any], value: Any) -> Any:
    """`fn` of every leaf, in the same containers."""
    return rebuild(value, iter([fn(leaf) for _, leaf in flatten(value)]))


def structure(value: Any) -> Hashable:
    """Equal for values with the same containers and names."""
    if value is None:
        return None
    named = children(value)
    if named is None:
        return "leaf"
    return type(value).__name__, tuple((name, structure(child)) for name, child in named)


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """(name, child) of a container, in the fixed order; None for a leaf."""
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)) is not None:
        return list(zip(fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return None
