"""JAX's pytrees, for the neutral code."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from perdure.distribute.jax.programs import name_of


class JaxTrees:
    """See perdure.distribute.engine.Trees."""

    def flatten(self, value: Any) -> tuple[list[Any], Hashable]:
        return jax.tree.flatten(value)

    def paths(self, value: Any) -> list[str]:
        return [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        return jax.tree.map(lambda leaf: fn(jnp.asarray(leaf)), value)
