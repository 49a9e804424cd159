"""Private page-aligned memory, reused, because touching new pages costs several times more."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

from perdure.store.pools import map_ahead, pool

STAGING_BYTES = 8 * 1024 * 1024
KEPT_BUFFERS = 7  # what one save takes, so that the next one touches no new memory
SMALL_BYTES = 256 * 1024

ALIGNMENT = 64
"""Every copy of a large array starts at a multiple of this, which suits every dtype."""

COPY_THREADS = 2
COPY_BYTES = 32 * 1024 * 1024
"""Copies of more bytes than this in all are shared between threads, in parts of this size."""

COPIED_TOGETHER = 32 * 1024
"""Arrays of at most this size are copied together, into memory of the allocator."""

_free: list[mmap.mmap] = []


def pages(nbytes: int) -> mmap.mmap:
    """New page-aligned memory of at least one byte, in huge pages if the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where memory without a file is private
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= SMALL_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages the memory has ordinary ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def leaf_memory(nbytes: int) -> memoryview:
    """New writable memory for a leaf, page-aligned unless it is small; MemoryError or OSError for
    none.

    The system joins mappings that follow each other, so that leaves of one restore are in huge
    pages even if each is smaller than one.
    """
    return memoryview(bytearray(nbytes) if nbytes < SMALL_BYTES else pages(nbytes))


def take_buffer() -> mmap.mmap:
    """A buffer of STAGING_BYTES with unspecified contents; return it with `give_buffer`."""
    try:
        return _free.pop()
    except IndexError:
        return pages(STAGING_BYTES)


def give_buffer(buffer: mmap.mmap) -> None:
    """Keep a buffer for the next file. At most KEPT_BUFFERS are kept, others are freed."""
    if len(_free) < KEPT_BUFFERS:
        _free.append(buffer)


def copy_bytes(target: memoryview, source: memoryview | bytes) -> None:
    """Copy `source` to the front of `target`. Unlike a slice assignment it releases the GIL."""
    import numpy as np  # not needed to list a run

    size = len(source)
    if size:
        np.copyto(np.frombuffer(target, np.uint8, size), np.frombuffer(source, np.uint8))


class CopyBuffer:
    """Memory for the copies of one list of arrays at a time; it grows to the largest of them."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def copy(self, arrays: Sequence[memoryview | bytes]) -> Iterator[memoryview]:
        """A copy of each array, in order, valid until the next call or `release`."""
        # Small ones in one call, because there may be very many.
        joined = memoryview(b"".join([data for data in arrays if len(data) <= COPIED_TOGETHER]))
        large = [data for data in arrays if len(data) > COPIED_TOGETHER]
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
            if len(data) > COPIED_TOGETHER:
                yield next(copies)
            else:
                yield joined[start : start + len(data)]
                start += len(data)

    def release(self) -> None:
        """Free the memory once nothing uses the last copies. May be called twice."""
        self._memory = None


def _copy_pairs(pairs: list[tuple[memoryview, memoryview | bytes]]) -> None:
    """Copy each source into its target, with several threads if there is much to copy."""
    parts = [
        (target[start : start + COPY_BYTES], source[start : start + COPY_BYTES])
        for target, source in pairs
        for start in range(0, len(source), COPY_BYTES)
    ]
    if sum(len(source) for _, source in parts) <= COPY_BYTES:
        for target, source in parts:
            copy_bytes(target, source)
        return
    threads = pool("copy", COPY_THREADS)
    for _ in map_ahead(threads, lambda part: copy_bytes(*part), parts, COPY_THREADS):
        pass
