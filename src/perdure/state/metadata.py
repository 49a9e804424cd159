"""What a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from perdure.state.adapter import adapter
from perdure.state.leaf_spec import LeafSpec
from perdure.state.leaf_values import plain_value
from perdure.state.paths import insert, split_path
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry


def metadata_tree(entries: Iterable[LeafEntry]) -> Any:
    """Nested dicts of `jax.ShapeDtypeStruct` (without JAX: `LeafSpec`) and Python scalars."""
    tree: dict[str, Any] = {}
    for entry in entries:
        insert(tree, split_path(entry.path), _describe(entry))
    return tree[""] if tree.keys() == {""} else tree


def _describe(entry: LeafEntry) -> Any:
    if entry.text is not None:
        return plain_value(Leaf(entry.dtype, (), memoryview(entry.text.encode())))
    spec = LeafSpec.of(entry)
    if "jax" not in sys.modules:
        return spec
    jax: Any = adapter("jax")
    return jax.abstract(spec, is_weak=entry.dtype.startswith(WEAK_PREFIX))
