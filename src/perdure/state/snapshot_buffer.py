"""`SnapshotBuffer`: reused memory that snapshots of changing arrays are copied into.

The training loop stands still for such a copy, and a copy into pages that the process has not touched
before takes several times as long. Invariant: only one snapshot at a time lives here.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from perdure.store.aligned_buffers import pages
from perdure.store.direct import copy_bytes
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.pools import map_ahead, pool

ALIGNMENT = 64
COPY_THREADS = 2
PART_BYTES = 32 * 1024 * 1024
"""From here on a copy is shared between threads, in parts of this size."""

SMALL_BYTES = 32 * 1024
"""Arrays up to here are copied together, into memory of the allocator, which uses it again as well."""


class SnapshotBuffer:
    """Holds one snapshot at a time. Its memory grows to the largest one and stays until `release`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def hold(self, leaves: Mapping[str, Leaf]) -> Leaves:
        """The same leaves, with a copy here of each that is not frozen.

        The copies of the call before are overwritten: nobody may use them any more.
        """
        held = Leaves(leaves, containers_of(leaves))
        changing = []
        small = []
        for path, leaf in leaves.items():
            if leaf.frozen:
                continue
            (small if len(leaf.data) <= SMALL_BYTES else changing).append((path, leaf))
        # In one call, because there may be very many.
        together = memoryview(b"".join([leaf.data for _, leaf in small]))
        at = 0
        for path, leaf in small:
            end = at + len(leaf.data)
            held[path] = Leaf(leaf.dtype, leaf.shape, together[at:end], True)
            at = end
        # Each on a boundary that every dtype and every copy loop is content with.
        needed = sum(-(-len(leaf.data) // ALIGNMENT) for _, leaf in changing) * ALIGNMENT
        if not needed:
            return held
        if self._memory is None or len(self._memory) < needed:
            self._memory = None  # the old one first, or both would be there at once
            self._memory = pages(needed)
        memory = memoryview(self._memory)
        copies: list[tuple[memoryview, memoryview]] = []
        at = 0
        for path, leaf in changing:
            target = memory[at : at + len(leaf.data)]
            copies.append((target, leaf.data))
            held[path] = Leaf(leaf.dtype, leaf.shape, target, True)
            at += -(-len(target) // ALIGNMENT) * ALIGNMENT
        _copy(copies)
        return held

    def release(self) -> None:
        """Give the memory back, as soon as nobody uses the last snapshot. May be called twice."""
        self._memory = None


def _copy(pairs: list[tuple[memoryview, memoryview]]) -> None:
    parts = [
        (target[at : at + PART_BYTES], source[at : at + PART_BYTES])
        for target, source in pairs
        for at in range(0, len(source), PART_BYTES)
    ]
    if sum(len(source) for _, source in parts) <= PART_BYTES:
        for target, source in parts:
            copy_bytes(target, source)
        return
    for _ in map_ahead(
        pool("copy", COPY_THREADS), lambda part: copy_bytes(*part), parts, COPY_THREADS
    ):
        pass
