"""A state as `{leaf path: Leaf}`, for a save: the leaves, and copies of those that may change.

The memory for the copies is reused: the loop waits, and new pages take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from perdure.errors import StateError
from perdure.state.adapter import Adapter, leaf_adapter, loaded_adapters
from perdure.state.leaf_spec import nested_too_deeply
from perdure.state.leaf_values import plain_value
from perdure.state.object_flatten import FreshTarget, ObjectFlattener, read_state
from perdure.state.paths import insert, split_path
from perdure.state.walk import Unwalked, Walk, node_of
from perdure.store.aligned_buffers import COPIED_TOGETHER, CopyBuffer
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf, Leaves, containers_of


def flatten(
    state: Any, fresh: FreshTarget | None = None, adapters: Sequence[Adapter] | None = None
) -> Leaves:
    """Every leaf of a state (or of its `Walk`) by its path, sharing memory with the live arrays.

    What the run has made of the `fresh` target is described in `containers`. `adapters` make leaves
    of arrays. Raises `UnsupportedLeafError` with the path of a value that cannot be restored
    exactly.
    """
    is_walked = adapters is None or isinstance(state, (Walk, Unwalked))
    walk = Walk.of(state) if is_walked else Walk(state, adapters=adapters)
    leaves = walk.leaves(adapters)
    flattener = ObjectFlattener(leaves, adapters or walk.adapters, enters=True)
    try:
        for path, node in walk.objects.items():
            if path not in walk.states:
                walk.states[path] = read_state(node, path)
            flattener.add(node, path, walk.states[path])
    except RecursionError:
        raise nested_too_deeply() from None
    if adapters is None:
        (fresh or FreshTarget()).describe(walk, leaves)
    return leaves


class SnapshotBuffer:
    """Memory for one snapshot at a time. It grows to the largest one, and is kept until `release`."""

    def __init__(self) -> None:
        self._memory = CopyBuffer()
        self._is_donated: Callable[[], bool] | None = None
        self._copies_donated = False

    def copy(self, leaves: Mapping[str, Leaf]) -> Leaves:
        """The same leaves, with a copy in this buffer of each that is not frozen; earlier copies
        are overwritten.

        Arrays that a step was given during the last save are copied too: otherwise that step copies
        them into new memory, which takes several times as long.
        """
        # There may be very many leaves, nearly all of them copies already.
        alive = [
            (path, leaf)
            for path, leaf in leaves.items()
            if not leaf.frozen or leaf.is_donated is not None
        ]
        if not alive and isinstance(leaves, Leaves):
            return leaves
        copied = Leaves(leaves, containers_of(leaves))
        donated = self._donated(alive)
        changing = [
            (path, leaf, leaf.shards.parts if leaf.shards else (leaf.data,))
            for path, leaf in alive
            if not leaf.frozen or path in donated
        ]
        copies = self._memory.copy([part for _, _, parts in changing for part in parts])
        for path, leaf, parts in changing:
            new = [next(copies) for _ in parts]
            if leaf.shards is None:
                copied[path] = Leaf(leaf.dtype, leaf.shape, new[0], True)
            else:
                shards = msgspec.structs.replace(leaf.shards, parts=tuple(new))
                copied[path] = Leaf(leaf.dtype, leaf.shape, leaf.data, True, shards=shards)
        return copied

    def note_donations(self) -> None:
        """Find out, at the end of a save, whether a step was given the arrays of the snapshot."""
        self._copies_donated = self._is_donated is not None and self._is_donated()
        self._is_donated = None  # it holds an array

    def _donated(self, leaves: Sequence[tuple[str, Leaf]]) -> Collection[str]:
        """Those to copy although they are frozen; after a save without donations a small one,
        because only an array that was copied shows whether a step was given the state."""
        shared = {path: leaf for path, leaf in leaves if leaf.is_donated is not None}
        small = next((path for path in shared if shared[path].nbytes <= COPIED_TOGETHER), None)
        if small is None:
            return ()
        self._is_donated = shared[small].is_donated
        return shared if self._copies_donated else (small,)

    def release(self) -> None:
        """Free the memory once nothing uses the last snapshot. May be called twice."""
        self._memory.release()


def snapshot(
    state: Any, into: SnapshotBuffer | None = None, fresh: FreshTarget | None = None
) -> Leaves:
    """`flatten`, with copies of all memory that may change. Copies in `into` are valid until the
    next one."""
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
