"""Checking the free space before a save, so that a full disk is found before the first byte.

The bytes to write are known only after hashing, because chunks that are there already are not written
again. So the size of the whole state is compared first, and only if that does not fit is it hashed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping

from perdure.store.format import CHUNK_BYTES, chunk_spans, hash_bytes
from perdure.store.leaf import Leaf
from perdure.store.storage import Storage

BYTES_PER_CHUNK = 256
"""Space for a chunk's line in the pack's index and in the manifest."""
BYTES_PER_LEAF = 512
"""Space for a leaf's path, type and shape in the manifest."""
BYTES_PER_SAVE = 64 * 1024
"""Space for headers, directories and the file system's own blocks."""


def ensure_free_space(storage: Storage, leaves: Mapping[str, Leaf], known: Collection[str]) -> None:
    """Raise `OSError` (ENOSPC), with the bytes that are needed and free, if a save cannot fit.

    `known` are hashes of chunks that will not be written. If a storage does not know its free space,
    nothing is raised.
    """
    free = storage.free_bytes()
    if free is None:
        return
    size = sum(len(leaf.data) for leaf in leaves.values())
    overhead = (
        BYTES_PER_SAVE
        + BYTES_PER_LEAF * len(leaves)
        + BYTES_PER_CHUNK * (size // CHUNK_BYTES + len(leaves))
    )
    if size + overhead <= free:
        return
    needed = _new_bytes(leaves, known) + overhead
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"no room for it: {needed} bytes are needed, {free} are free; nothing was written",
        )


def _new_bytes(leaves: Mapping[str, Leaf], known: Collection[str]) -> int:
    fresh: dict[str, int] = {}
    text = 0
    for leaf in leaves.values():
        if leaf.is_scalar:
            text += len(leaf.data)
        else:
            for start, stop in chunk_spans(len(leaf.data)):
                digest = hash_bytes(leaf.data[start:stop])
                if digest not in known:
                    fresh[digest] = stop - start
    return sum(fresh.values()) + text
