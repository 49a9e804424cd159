"""Page-aligned memory, and buffers of it that are reused: touching new pages costs several times more.

The memory is private to the process, so that a forked child never writes into the buffers of its
parent.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

STAGING_BYTES = 8 * 1024 * 1024
KEPT_BUFFERS = 7  # what one save takes, so that the next one touches no new memory
HUGE_PAGE = 2 * 1024 * 1024
SMALL_BYTES = 256 * 1024
LARGE_BYTES = 4 * HUGE_PAGE
SLAB_BYTES = 16 * HUGE_PAGE

_free: list[mmap.mmap] = []


def pages(nbytes: int) -> mmap.mmap:
    """New page-aligned memory of at least one byte, in huge pages if the system has them.

    The system gets the memory back once the last view of it is gone.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages the memory has ordinary ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class LeafMemory:
    """New memory for leaves, writable, and page-aligned unless it is small.

    Leaves of medium size share slabs, because memory that is not much larger than a huge page gets few
    of them, and ordinary pages take four times as long to touch as their bytes take to verify. A slab
    is in use until no leaf in it is.

    Args:
        sizes: The bytes of each leaf that will be asked for, in any order.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._left = sum(_rounded(size) for size in sizes if SMALL_BYTES <= size < LARGE_BYTES)
        self._slab = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Memory for the next leaf; raises `MemoryError` or `OSError` if there is none."""
        if nbytes < SMALL_BYTES:
            return memoryview(bytearray(nbytes))
        if nbytes >= LARGE_BYTES:
            return memoryview(pages(nbytes))
        if len(self._slab) < nbytes:
            self._slab = memoryview(pages(min(SLAB_BYTES, self._left)))
        taken, self._slab = self._slab[:nbytes], self._slab[_rounded(nbytes) :]
        self._left -= _rounded(nbytes)
        return taken


def _rounded(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


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
