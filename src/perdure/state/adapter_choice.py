"""Which of the adapters takes a value."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, adapter
from perdure.state.leaf_errors import type_name
from perdure.state.leaf_spec import LeafSpec
from perdure.state.per_rank import PerRank, per_rank_node
from perdure.state.stateful import Stateful
from perdure.store.leaf import Leaf


def node_of(
    value: Any, path: str, adapters: Sequence[Adapter], stored: Mapping[str, LeafSpec] | None
) -> Node | Stateful:
    """The interior value at `path`.

    `stored` has the specs of the whole checkpoint during a restore, and is None during a save.

    Raises:
        UnsupportedLeafError: no adapter takes the value, or it cannot be restored exactly.
    """
    stored_below = None if stored is None else SpecsBelow(stored, path)
    if isinstance(value, PerRank):
        return per_rank_node(value, stored_below, path)
    for candidate in adapters:
        if (node := candidate.node(value, stored_below)) is not None:
            return node
    raise UnsupportedLeafError(
        f"a value of type {type_name(value)} has no exact form in a checkpoint. {_remedy(value)}"
    )


def _remedy(value: Any) -> str:
    if any(cls.__module__.startswith("tensorflow.python.data.") for cls in type(value).__mro__):
        return (
            "Leave it out of the state, and begin the data at the restored step: "
            "`dataset.skip(start)`, with a `seed` for each `shuffle`."
        )
    return (
        "Give it `state_dict` and `load_state_dict`, turn it into arrays and scalars, or leave it out "
        "of the state."
    )


def leaf_adapter(value: Any, adapters: Sequence[Adapter]) -> tuple[Adapter, LeafSpec] | None:
    """The adapter for which a value is a leaf, and its dtype and shape; None for an interior value."""
    for candidate in adapters:
        if (spec := candidate.spec(value)) is not None:
            return candidate, spec
    return None


def load_leaf(taker: Adapter, like: Any, leaf: Leaf) -> Any:
    """An array such as `like`, made by the adapter that takes it, with the bits of `leaf`."""
    if not leaf.is_weak:
        return taker.load(like, leaf)
    # Only JAX has weak types. A Python number in the target is a weakly typed array after the first
    # compiled step; as a NumPy scalar it would be strongly typed.
    if "jax" in sys.modules:
        jax = adapter("jax")
        if taker is jax or type(like) in (int, float, complex):
            return jax.load(like, leaf)
    return taker.load(like, leaf.strong())


class SpecsBelow(Mapping[str, LeafSpec]):
    """The part of a mapping below one path. It is searched only if an adapter looks at it."""

    def __init__(self, specs: Mapping[str, LeafSpec], path: str) -> None:
        self._specs = specs
        self._prefix = f"{path}/" if path else ""

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (path[start:] for path in self._specs if path.startswith(self._prefix))

    def __getitem__(self, path: str) -> LeafSpec:
        return self._specs[self._prefix + path]

    def __len__(self) -> int:
        return sum(1 for _ in self)
