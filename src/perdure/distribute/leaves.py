"""What can be said of any value through an engine's `Trees`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from perdure.distribute.arrays import namespace
from perdure.distribute.engine import Trees


def signature(trees: Trees, value: Any) -> Hashable:
    """Structure, dtypes and shapes; equal for values that can be added."""
    leaves, structure = trees.flatten(value)
    return structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


def describe_leaf(leaf: Any) -> str:
    """dtype and shape, such as "float32[3, 4]"; the same text for every framework."""
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def describe(trees: Trees, value: Any) -> dict[str, str]:
    """dtype and shape of every leaf, by path."""
    leaves, _ = trees.flatten(value)
    return dict(zip(trees.paths(value), map(describe_leaf, leaves), strict=True))


def stack(trees: Trees, values: list[Any]) -> Any:
    """One value, whose leaves are those of all values along a new first axis."""
    columns: list[list[Any]] = []
    for value in values:
        leaves: list[Any] = []
        trees.map(leaves.append, value)
        columns.append(leaves)
    rows = zip(*columns, strict=True)
    return trees.map(lambda leaf: namespace(leaf).stack(list(next(rows))), values[0])
