"""Which shared chunks a save reads again, so that damage to them is found while it can be repaired.

A save does not write a chunk that an earlier save wrote, and does not look at it either. Therefore each
save, after its commit, reads a part of what it shares: it moves through the leaves of its checkpoint in
the order of their paths, starting where the save before stopped, past 1/PASS_SAVES of the bytes of the
state, and reads those chunks there that other saves wrote. So every shared chunk is read again within
PASS_SAVES saves, at less than 1/PASS_SAVES of the bytes that a save handles.
"""

from __future__ import annotations

from bisect import bisect_left

from perdure.store.format import pack_step
from perdure.store.manifest import Chunk, LeafRecord, Manifest

PASS_SAVES = 512


class Cursor:
    """The place in the state up to which shared chunks were read again."""

    def __init__(self) -> None:
        self._path = ""
        self._chunk = 0
        self._credit = 0

    def advance(self, manifest: Manifest, nbytes: int) -> list[tuple[LeafRecord, Chunk, int]]:
        """Move on by the share of one save that handled `nbytes`.

        Returns the shared chunks that were passed: leaf, chunk, bytes of the chunk.
        """
        shared = [pack_step(pack.name) != manifest.step for pack in manifest.packs]
        leaves = manifest.leaves
        if not any(shared):
            return []
        self._credit += -(-nbytes // PASS_SAVES)
        passed: list[tuple[LeafRecord, Chunk, int]] = []
        at = bisect_left(leaves, self._path, key=lambda leaf: leaf.path)
        for number in range(at, at + len(leaves) + 1):
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
        # Once around, which a state that shrank can need: the rest of the credit is void.
        self._credit = 0
        return passed
