"""A state as `{leaf path: Leaf}`, for a save, and leaves as nested dicts without a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.errors import StateError
from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.fresh_target import FreshTarget
from perdure.state.leaf_errors import duplicate_path, nested_too_deeply
from perdure.state.leaf_values import plain_value
from perdure.state.object_flatten import ObjectFlattener, read_state
from perdure.state.paths import insert, split_path
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.state.stateful import Stateful
from perdure.state.walk import Unwalked, Walk
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf, Leaves


def flatten(
    state: Any, fresh: FreshTarget | None = None, adapters: Sequence[Adapter] | None = None
) -> Leaves:
    """Every leaf of a state by its path, sharing memory with the live arrays where possible.

    Args:
        state: a tree of containers, arrays, scalars and objects of the frameworks that are imported, or
            the `Walk` of one.
        fresh: what the target of the program had at first; what the run has made of it is described
            in `containers`.
        adapters: what makes leaves of arrays; by default the adapters of the imported frameworks.

    Returns:
        The leaves. A path joins dict keys, field names and positions with `/`: `model/dense/kernel`.

    Raises:
        UnsupportedLeafError: a value cannot be restored exactly. The message starts with its path.
    """
    is_walked = adapters is None or isinstance(state, (Walk, Unwalked))
    walk = Walk.of(state) if is_walked else Walk(state, adapters=adapters)
    leaves = walk.leaves(adapters)
    try:
        for path, node in walk.objects.items():
            if path not in walk.states:
                walk.states[path] = read_state(node, path)
            add_object(leaves, adapters or walk.adapters, node, path, walk.states[path])
    except RecursionError:
        raise nested_too_deeply() from None
    if adapters is None:
        (fresh or FreshTarget()).describe(walk, leaves)
    return leaves


def add_object(
    leaves: Leaves, adapters: Sequence[Adapter], node: Stateful, path: str, state: Any
) -> None:
    """Add the leaves and the containers of one object with its present state."""

    def add_live(value: Any, inside: str) -> None:
        walk = Walk(value, path=inside, adapters=adapters)
        for leaf_path, leaf in walk.leaves().items():
            if leaf_path in leaves:
                raise duplicate_path(leaf_path)
            leaves[leaf_path] = leaf
        for object_path, inner in walk.objects.items():
            add_object(leaves, adapters, inner, object_path, read_state(inner, object_path))

    ObjectFlattener(adapters, leaves, add_live).add_state(node, path, state)


def snapshot(
    state: Any, into: SnapshotBuffer | None = None, fresh: FreshTarget | None = None
) -> Leaves:
    """`flatten`, with copies of all memory that may change, so that the state may change afterwards.

    Args:
        state: as for `flatten`.
        into: the buffer for the copies, which stay valid until the next snapshot into it. Without it,
            the copies are in new memory.
        fresh: as for `flatten`.
    """
    with gc_paused():
        return (into or SnapshotBuffer()).copy(flatten(state, fresh))


def unflatten(leaves: Mapping[str, Leaf]) -> Any:
    """Leaves as nested dicts of NumPy arrays and Python scalars, for use without a target."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        insert(tree, split_path(path), plain_value(leaf))
    return tree[""] if tree.keys() == {""} else tree


def is_state(value: Any) -> bool:
    """Whether `value` itself is a leaf or a container of leaves."""
    adapters = loaded_adapters()
    try:
        return leaf_adapter(value, adapters) is not None or bool(node_of(value, "", adapters, None))
    except StateError:
        return False
