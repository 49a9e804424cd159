"""Flax NNX: modules (restored in place), their states, and variables without a `value` in the path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from perdure.state.adapter import ContainersOnly, Node, Spec

_OBJECTS = getattr(nnx, "Pytree", nnx.Module)


class FlaxState(ContainersOnly):
    """See `perdure.state.adapter.Adapter`. Arrays inside are JAX's and left to its adapter."""

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        if isinstance(value, nnx.Variable):
            return Node([("", value.get_value())], lambda new: value.replace(new[0]))
        if isinstance(value, nnx.State):
            # `value[key]` would give a dict in it as another State.
            return Node([("", value.raw_mapping)], lambda new: type(value)(new[0]))
        if isinstance(value, _OBJECTS):
            return Node(
                [("", nnx.state(value))], lambda new: nnx.update(value, new[0]), in_place=True
            )
        return None


ADAPTER = FlaxState()
