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
from perdure.store.manifest import LeafRecord


def metadata_tree(records: Iterable[LeafRecord]) -> Any:
    """Nested dicts of `jax.ShapeDtypeStruct` (without JAX: `LeafSpec`) and Python scalars."""
    tree: dict[str, Any] = {}
    for record in records:
        insert(tree, split_path(record.path), _describe(record))
    return tree[""] if tree.keys() == {""} else tree


def _describe(record: LeafRecord) -> Any:
    if record.text is not None:
        return plain_value(Leaf(record.dtype, (), memoryview(record.text.encode())))
    spec = LeafSpec.of(record)
    if "jax" not in sys.modules:
        return spec
    jax: Any = adapter("jax")
    return jax.abstract(spec, is_weak=record.dtype.startswith(WEAK_PREFIX))
