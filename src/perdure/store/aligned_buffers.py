"""Page-aligned memory, and buffers of it that are reused: touching new pages costs several times more.

The memory is private to the process, so that a forked child never writes into the buffers of its
parent.
"""

from __future__ import annotations

import contextlib
import mmap

STAGING_BYTES = 8 * 1024 * 1024
KEPT_BUFFERS = 7  # what one save takes, so that the next one touches no new memory
SMALL_BYTES = 256 * 1024

_free: list[mmap.mmap] = []


def pages(nbytes: int) -> mmap.mmap:
    """New page-aligned memory of at least one byte, in huge pages if the system has them.

    The system gets the memory back once the last view of it is gone.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= SMALL_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages the memory has ordinary ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def leaf_memory(nbytes: int) -> memoryview:
    """New memory for a leaf, writable, page-aligned unless it is small, and free once the leaf is.

    To touch ordinary pages takes four times as long as to verify their bytes. The system joins
    mappings that follow each other, so that leaves of one restore, which takes the memory of all before
    it fills any, are in huge pages even if each is smaller than one.

    Raises:
        MemoryError, OSError: There is no memory.
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
