"""A state as `{leaf path: Leaf}`, for a save, and leaves as nested dicts without a target."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from perdure.errors import StateError
from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.containers import array_class_name
from perdure.state.leaf_errors import add_path, duplicate_path, nested_too_deeply
from perdure.state.leaf_values import is_plain, plain_value
from perdure.state.object_flatten import ObjectFlattener
from perdure.state.paths import TOGETHER, insert, join_key, join_keys, split_path
from perdure.state.per_rank import current_rank_context
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.state.stateful import Stateful
from perdure.store.gc_pause import gc_paused
from perdure.store.json_blocks import blocks
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import Container


def flatten(
    state: Any, plain: Collection[str] = (), adapters: Sequence[Adapter] | None = None
) -> Leaves:
    """Every leaf of a state by its path, sharing memory with the live arrays where possible.

    Args:
        state: a tree of containers, arrays, scalars and objects of the frameworks that are imported.
        plain: the paths at which the target of the program has NumPy arrays and numbers. If `state`
            has an array of a framework at such a path, its class is recorded in `containers`.
        adapters: what makes leaves of arrays; by default the adapters of the imported frameworks.

    Returns:
        The leaves. A path joins dict keys, field names and positions with `/`: `model/dense/kernel`.

    Raises:
        UnsupportedLeafError: a value cannot be restored exactly. The message starts with its path.
    """
    leaves = Leaves()
    try:
        _add_leaves([("", state)], "", adapters or loaded_adapters(), leaves, plain)
    except RecursionError:
        raise nested_too_deeply() from None
    return leaves


def snapshot(state: Any, into: SnapshotBuffer | None = None, plain: Collection[str] = ()) -> Leaves:
    """`flatten`, with copies of all memory that may change, so that the state may change afterwards.

    Args:
        state: as for `flatten`.
        into: the buffer for the copies, which stay valid until the next snapshot into it. Without it,
            the copies are in new memory.
        plain: as for `flatten`.
    """
    with gc_paused():
        return (into or SnapshotBuffer()).copy(flatten(state, plain))


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


def _add_many(
    block: Sequence[tuple[str, Any]],
    parent: str,
    taker: Adapter,
    leaves: Leaves,
    plain: Collection[str],
) -> bool:
    """Add the leaves of values of one type in few calls; False if `taker` needs one for each."""
    keys, values = zip(*block, strict=True)
    if (plain and not is_plain(values[0])) or (many := taker.leaves(values)) is None:
        return False
    paths = join_keys(parent, keys)
    if all(map(is_, map(leaves.setdefault, paths, many), many)):
        return True
    for path, leaf in zip(paths, many, strict=True):
        if leaves.get(path) is leaf:
            del leaves[path]
    return False  # which finds the path that there is twice


def _add_leaves(
    children: Iterable[tuple[str, Any]],
    parent: str,
    adapters: Sequence[Adapter],
    leaves: Leaves,
    plain: Collection[str],
) -> None:
    # The training loop waits for this. So `Adapter.leaf` both decides whether a value is a leaf and
    # returns its bytes, the adapter that took the last value is asked alone if this one has the same
    # type, for many values in one call if it can, and only a value that is no leaf costs a call of
    # this function.
    path = parent
    kind: type | None = None
    taker = adapters[0]
    rest = chain.from_iterable(
        block
        for block in blocks(children, TOGETHER)
        if type(block[0][1]) is not kind or not _add_many(block, parent, taker, leaves, plain)
    )
    prefix = f"{parent}/" if parent else ""
    try:
        for key, value in rest:
            path = prefix + key if key.isalnum() else join_key(parent, key)
            leaf = None
            if type(value) is kind:
                leaf = taker.leaf(value)
            if leaf is None:
                for adapter in adapters:
                    leaf = adapter.leaf(value)
                    if leaf is not None:
                        kind, taker = type(value), adapter
                        break
            if leaf is None:
                node = node_of(value, path, adapters, None)
                if isinstance(node, Stateful):
                    ObjectFlattener(
                        adapters,
                        leaves,
                        lambda children, path: _add_leaves(children, path, adapters, leaves, ()),
                    ).flatten(node, path)
                else:
                    _add_leaves(node.children, path, adapters, leaves, plain)
                continue
            if leaves.setdefault(path, leaf) is not leaf:
                raise duplicate_path(path)
            if (
                plain
                and path in plain
                and not is_plain(value)
                and not current_rank_context().owns(path)
            ):
                leaves.containers[path] = Container("array", arrays=array_class_name(value))
    except StateError as error:
        add_path(error, path)
        raise
