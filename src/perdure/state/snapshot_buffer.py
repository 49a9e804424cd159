"""`SnapshotBuffer`: memory that is reused for the copies that a snapshot makes of changing arrays.

The training loop waits for these copies, and a copy into pages that the process has not touched before
takes several times as long. Invariant: a buffer holds one snapshot at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from itertools import accumulate

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

    def copy(self, leaves: Mapping[str, Leaf]) -> Leaves:
        """The same leaves, with a copy in this buffer of each that is not frozen.

        The copies of the call before are overwritten, so nothing may use them any more.
        """
        copied = Leaves(leaves, containers_of(leaves))
        large = []
        small = []
        for path, leaf in leaves.items():
            if leaf.frozen:
                continue
            (small if len(leaf.data) <= SMALL_BYTES else large).append((path, leaf))
        # In one call, because there may be very many.
        joined = memoryview(b"".join([leaf.data for _, leaf in small]))
        ends = list(accumulate([len(leaf.data) for _, leaf in small]))
        parts = map(joined.__getitem__, map(slice, [0, *ends], ends))
        for (path, leaf), part in zip(small, parts, strict=True):
            copied[path] = Leaf(leaf.dtype, leaf.shape, part, True)
        size = sum(-(-len(leaf.data) // ALIGNMENT) for _, leaf in large) * ALIGNMENT
        if not size:
            return copied
        if self._memory is None or len(self._memory) < size:
            self._memory = None  # freed first, so that both are never allocated at once
            self._memory = pages(size)
        memory = memoryview(self._memory)
        pairs: list[tuple[memoryview, memoryview]] = []
        offset = 0
        for path, leaf in large:
            target = memory[offset : offset + len(leaf.data)]
            pairs.append((target, leaf.data))
            copied[path] = Leaf(leaf.dtype, leaf.shape, target, True)
            offset += -(-len(target) // ALIGNMENT) * ALIGNMENT
        _copy_pairs(pairs)
        return copied

    def release(self) -> None:
        """Free the memory once nothing uses the last snapshot. May be called twice."""
        self._memory = None


def _copy_pairs(pairs: list[tuple[memoryview, memoryview]]) -> None:
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
