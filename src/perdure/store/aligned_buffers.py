"""Memory that is used again: a page that the process touched before costs a fraction of a new one.

Owns the page-aligned buffers that files are written from, and how page-aligned memory is made. Memory
is private to the process, so that a fork never writes into the buffers of its parent.
"""

from __future__ import annotations

import contextlib
import mmap

STAGING_BYTES = 8 * 1024 * 1024
KEPT_BUFFERS = 5
HUGE_PAGE = 2 * 1024 * 1024

_free: list[mmap.mmap] = []


def pages(nbytes: int) -> mmap.mmap:
    """New page-aligned memory of at least one byte, in huge pages where the system has them.

    Its memory goes back to the system with the last view of it.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: ordinary pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def take_buffer() -> mmap.mmap:
    """A buffer of STAGING_BYTES with unspecified contents; hand it back with `give_buffer`."""
    try:
        return _free.pop()
    except IndexError:
        return pages(STAGING_BYTES)


def give_buffer(buffer: mmap.mmap) -> None:
    """Keep a buffer for the next file; KEPT_BUFFERS stay, the rest goes back to the system."""
    if len(_free) < KEPT_BUFFERS:
        _free.append(buffer)
