"""JAX: arrays, typed PRNG keys, abstract arrays as templates, and every registered pytree node."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node, Spec
from perdure.state.builtin import array_leaf, leaf_array
from perdure.store.leaf import Leaf

_BUILTIN = (dict, list, tuple, type(None))


def key_name(entry: Any) -> str:
    """Readable name of one entry of a JAX key path."""
    return jax.tree_util.keystr((entry,), simple=True)


class JaxState:
    """See `perdure.state.adapter.Adapter`."""

    def spec(self, value: Any) -> Spec | None:
        if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            return None
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedLeafError(
                "a traced value; save outside of jit, where arrays are concrete."
            )
        name = _dtype_name(value.dtype)
        return Spec(f"key<{_impl(value)}>" if name is None else name, tuple(value.shape))

    def leaf(self, value: Any) -> Leaf | None:
        spec = self.spec(value)
        if spec is None:
            return None
        if isinstance(value, jax.ShapeDtypeStruct):
            raise UnsupportedLeafError(
                "an abstract array has no data; it serves only as a template."
            )
        if not value.is_fully_addressable and not value.is_fully_replicated:
            # Its shards lie in several processes. A collective: every process saves at the same step.
            value = multihost_utils.process_allgather(value, tiled=True)
        data = jax.random.key_data(value) if spec.dtype.startswith("key<") else value
        # On a CPU this shares the device buffer. The array then counts as referenced from outside,
        # so that a step that donates it works on a copy and these bytes stay as they are.
        words = array_leaf(np.asarray(data), frozen=True)
        return Leaf(spec.dtype, spec.shape, words.data, frozen=True)

    def load(self, like: Any, leaf: Leaf) -> Any:
        if leaf.dtype.startswith("key<"):
            words = np.frombuffer(leaf.data, np.uint32).reshape((*leaf.shape, -1))
            return self._place(like, jax.random.wrap_key_data(jnp.asarray(words), impl=_impl(like)))
        return self._place(like, leaf_array(leaf))

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        if isinstance(value, _BUILTIN):
            return None
        children, treedef = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda part: part is not value
        )
        if jax.tree_util.treedef_is_leaf(treedef) and len(children) == 1 and not children[0][0]:
            return None
        return Node(
            [(key_name(path[0]), child) for path, child in children],
            lambda new: jax.tree_util.tree_unflatten(treedef, new),
        )

    def _place(self, like: Any, array: Any) -> Any:
        sharding = getattr(like, "sharding", None)
        if sharding is not None and not sharding.is_fully_addressable:
            # Each process places the shards that are its own, whatever sharding they were saved from.
            return jax.make_array_from_callback(like.shape, sharding, lambda index: array[index])
        if sharding is not None and getattr(like, "committed", True):
            return jax.device_put(array, sharding)
        return jnp.asarray(array)


@cache
def _dtype_name(dtype: Any) -> str | None:
    """Name of a dtype; None for typed keys."""
    return None if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.name


def _impl(value: Any) -> str:
    return (
        str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else value.dtype._impl.name
    )


ADAPTER = JaxState()
