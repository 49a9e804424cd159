"""Checking the free space before a save, so that a full disk is found before the first byte.

The bytes to write are known only after hashing, because chunks that are there already are not written
again. So the size of the whole state is compared first, and only if that does not fit is it hashed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping

from perdure.store.format import CHUNK_BYTES, chunk_spans
from perdure.store.leaf import AnyLeaf
from perdure.store.storage import Storage

BYTES_PER_CHUNK = 256
"""Space for a chunk's line in the pack's index and in the manifest."""
BYTES_PER_LEAF = 512
"""Space for a leaf's path, type and shape in the manifest."""
BYTES_PER_SAVE = 64 * 1024
"""Space for headers, directories and the file system's own blocks."""


def ensure_free_space(
    storage: Storage,
    leaves: Mapping[str, AnyLeaf],
    nbytes: int,
    process_leaves: Mapping[str, AnyLeaf],
    known: Collection[str],
) -> None:
    """Raise `OSError` (ENOSPC), with the bytes that are needed and free, if a save cannot fit.

    `leaves` are those of the state, in all processes together, of `nbytes` bytes, and `known` the
    hashes of chunks that will not be written. `process_leaves` are always written.
    """
    own = sum(leaf.nbytes for leaf in process_leaves.values())
    count = len(leaves) + len(process_leaves)
    overhead = (
        BYTES_PER_SAVE
        + BYTES_PER_LEAF * count
        + BYTES_PER_CHUNK * ((nbytes + own) // CHUNK_BYTES + count)
    )
    free = storage.free_bytes()
    if free is not None and nbytes + own + overhead > free:
        ensure_free_bytes(storage, _new_bytes(leaves, known) + own + overhead)


def ensure_free_bytes(storage: Storage, needed: int) -> None:
    """Raise `OSError` (ENOSPC) if there is less free space, and the storage knows how much it has."""
    free = storage.free_bytes()
    if free is not None and needed > free:
        raise OSError(
            errno.ENOSPC,
            f"no room for it: {needed} bytes are needed, {free} are free; nothing was written",
        )


def _new_bytes(leaves: Mapping[str, AnyLeaf], known: Collection[str]) -> int:
    """Bytes of the chunks that `known` lacks, each once, and of the scalars."""
    fresh: dict[str, int] = {}
    text = 0
    for leaf in leaves.values():
        if leaf.is_scalar:
            text += leaf.nbytes
            continue
        for digest, (start, stop) in zip(leaf.hashes(), chunk_spans(leaf.nbytes), strict=True):
            if digest not in known:
                fresh[digest] = stop - start
    return sum(fresh.values()) + text
