"""`SnapshotBuffer`: memory that is reused for the copies that a snapshot makes of changing arrays.

The training loop waits for these copies, and a copy into pages that the process has not touched before
takes several times as long. Invariant: a buffer holds one snapshot at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from perdure.store.aligned_buffers import pages
from perdure.store.direct import copy_bytes
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.pools import map_ahead, pool

ALIGNMENT = 64
"""Every copy of a large array starts at a multiple of this, which suits every dtype."""

COPY_THREADS = 2
PART_BYTES = 32 * 1024 * 1024
"""Copies of more bytes than this in all are shared between threads, in parts of this size."""

SMALL_BYTES = 32 * 1024
"""Arrays of at most this size are copied together, into memory of the allocator."""


class SnapshotBuffer:
    """Memory for one snapshot at a time. It grows to the largest one, and is kept until `release`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._is_donated: Callable[[], bool] | None = None
        self._copies_donated = False

    def copy(self, leaves: Mapping[str, Leaf]) -> Leaves:
        """The same leaves, with a copy in this buffer of each that is not frozen.

        The copies of the call before are overwritten, so nothing may use them any more. Arrays that a
        step was given during the last save are copied too: otherwise that step copies them, into new
        memory, which takes several times as long.
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
        copies = self._copies([part for _, _, parts in changing for part in parts])
        for path, leaf, parts in changing:
            new = [next(copies) for _ in parts]
            if leaf.shards is None:
                copied[path] = Leaf(leaf.dtype, leaf.shape, new[0], True)
            else:
                shards = msgspec.structs.replace(leaf.shards, parts=tuple(new))
                copied[path] = Leaf(leaf.dtype, leaf.shape, leaf.data, True, shards=shards)
        return copied

    def _copies(self, arrays: Sequence[memoryview | bytes]) -> Iterator[memoryview]:
        """A copy of each array, in order."""
        # Small ones in one call, because there may be very many.
        joined = memoryview(b"".join([data for data in arrays if len(data) <= SMALL_BYTES]))
        large = [data for data in arrays if len(data) > SMALL_BYTES]
        size = sum(-(-len(data) // ALIGNMENT) for data in large) * ALIGNMENT
        if size and (self._memory is None or len(self._memory) < size):
            self._memory = None  # freed first, so that both are never allocated at once
            self._memory = pages(size)
        memory = memoryview(self._memory or b"")
        targets: list[memoryview] = []
        start = 0
        for data in large:
            targets.append(memory[start : start + len(data)])
            start += -(-len(data) // ALIGNMENT) * ALIGNMENT
        _copy_pairs(list(zip(targets, large, strict=True)))
        copies = iter(targets)
        start = 0
        for data in arrays:
            if len(data) > SMALL_BYTES:
                yield next(copies)
            else:
                yield joined[start : start + len(data)]
                start += len(data)

    def note_donations(self) -> None:
        """Find out, at the end of a save, whether a step was given the arrays of the snapshot."""
        self._copies_donated = self._is_donated is not None and self._is_donated()
        self._is_donated = None  # it holds an array

    def _donated(self, leaves: Sequence[tuple[str, Leaf]]) -> Collection[str]:
        """Those to copy although they are frozen: after a save without donations a small one.

        A step that is given an array which something holds leaves it as it is, so that only an array
        that was copied shows whether a step was given the state.
        """
        shared = {path: leaf for path, leaf in leaves if leaf.is_donated is not None}
        small = next((path for path in shared if shared[path].nbytes <= SMALL_BYTES), None)
        if small is None:
            return ()
        self._is_donated = shared[small].is_donated
        return shared if self._copies_donated else (small,)

    def release(self) -> None:
        """Free the memory once nothing uses the last snapshot. May be called twice."""
        self._memory = None


def _copy_pairs(pairs: list[tuple[memoryview, memoryview | bytes]]) -> None:
    """Copy each source into its target, with several threads if there is much to copy."""
    parts = [
        (target[start : start + PART_BYTES], source[start : start + PART_BYTES])
        for target, source in pairs
        for start in range(0, len(source), PART_BYTES)
    ]
    if sum(len(source) for _, source in parts) <= PART_BYTES:
        for target, source in parts:
            copy_bytes(target, source)
        return
    for _ in map_ahead(
        pool("copy", COPY_THREADS), lambda part: copy_bytes(*part), parts, COPY_THREADS
    ):
        pass
