"""Choosing the shared chunks that a save reads again, to find damage while it can be repaired.

A save neither writes nor reads the chunks that earlier saves wrote. So each save, after its commit,
reads a part of them: it continues through the leaves of its checkpoint, in the order of their
paths, where the save before stopped, for 1/PASS_SAVES of the bytes of the state, and reads the
chunks there that other saves wrote. Every shared chunk is read again within PASS_SAVES saves of a
process, for less than 1/PASS_SAVES of the bytes of a save. The first save of a process begins at a
place that its step decides, so that runs which are restarted often do not read the same leaves over
and over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from perdure.store.format import pack_step
from perdure.store.manifest import Chunk, LeafEntry, Manifest

PASS_SAVES = 512
# Multiples of it, modulo 1, are spread evenly: the steps of restarts leave no part of the state out.
_SPREAD = (5**0.5 - 1) / 2


class Cursor:
    """The place in the state up to which shared chunks have been read again."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._chunk = 0
        self._credit = 0

    def advance(self, manifest: Manifest, nbytes: int) -> list[tuple[LeafEntry, Chunk, int]]:
        """Move on by the share of one save of `nbytes`.

        Returns:
            The shared chunks that were passed: (leaf, chunk, bytes of the decoded chunk).
        """
        shared = [pack_step(pack.name) != manifest.step for pack in manifest.packs]
        leaves = manifest.leaves
        if not leaves or not any(shared):
            return []
        self._credit += -(-nbytes // PASS_SAVES)
        if self._path is None:
            self._path, self._chunk = _place(leaves, manifest.step * _SPREAD % 1)
        passed: list[tuple[LeafEntry, Chunk, int]] = []
        begin = bisect_left(leaves, self._path, key=lambda leaf: leaf.path)
        for number in range(begin, begin + len(leaves) + 1):
            leaf = leaves[number % len(leaves)]
            first = self._chunk if leaf.path == self._path else 0
            sizes = leaf.sizes()
            for index in range(first, len(sizes)):
                if self._credit <= 0:
                    self._path, self._chunk = leaf.path, index
                    return passed
                chunk = leaf.chunks[index]
                self._credit -= sizes[index]
                if shared[chunk.pack]:
                    passed.append((leaf, chunk, sizes[index]))
            self._chunk = 0
        # All leaves were passed, which happens if the state shrank: the rest of the credit is dropped.
        self._credit = 0
        return passed


def _place(leaves: Sequence[LeafEntry], share: float) -> tuple[str, int]:
    """The leaf and the number of its chunk at this share of the bytes of a state."""
    left = share * sum(sum(leaf.sizes()) for leaf in leaves)
    for leaf in leaves:
        for index, size in enumerate(leaf.sizes()):
            if left < size:
                return leaf.path, index
            left -= size
    return "", 0
