"""Memory for the snapshots of a manager: copies of the leaves that may change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from perdure.store.aligned_buffers import COPIED_TOGETHER, CopyBuffer
from perdure.store.leaf import Leaf, Leaves, containers_of


class SnapshotBuffer:
    """Memory for one snapshot at a time. It grows to the largest one, and is kept until `release`."""

    def __init__(self) -> None:
        self._memory = CopyBuffer()
        self._is_donated: Callable[[], bool] | None = None
        self._copies_donated = False

    def copy(self, leaves: Mapping[str, Leaf]) -> Leaves:
        """The same leaves, with a copy in this buffer of each that is not frozen; earlier copies
        are overwritten. Arrays that a step was given during the last save are copied too, or that
        step would copy them."""
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
                copied[path] = Leaf(leaf.dtype, leaf.shape, new[0], True, axes=leaf.axes)
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
