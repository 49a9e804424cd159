"""The adapter of Flax NNX: modules (restored in place), their states, and variables (no part of a
path)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from perdure.state.adapter import Adapter, Node
from perdure.state.leaf_spec import LeafSpec

_OBJECTS = getattr(nnx, "Pytree", nnx.Module)


class FlaxState(Adapter):
    """Turns modules, states and variables into nodes. The adapter of JAX takes their arrays."""

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | None:
        if isinstance(value, nnx.Variable):
            return Node([("", value.get_value())], lambda new: value.replace(new[0]))
        if isinstance(value, nnx.State):
            # `value[key]` would wrap a dict inside in another State.
            return Node([("", value.raw_mapping)], lambda new: type(value)(new[0]))
        if isinstance(value, _OBJECTS):
            return Node(
                [("", nnx.state(value))], lambda new: nnx.update(value, new[0]), in_place=True
            )
        return None


ADAPTER = FlaxState()
