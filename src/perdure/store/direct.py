"""Reading and writing files at the speed of the disk, with page-aligned memory and O_DIRECT.

On a file system that refuses O_DIRECT the same calls go through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from perdure.runtime.system import read_into
from perdure.store.aligned_buffers import STAGING_BYTES, copy_bytes, give_buffer, take_buffer
from perdure.store.failures import naming
from perdure.store.pools import finish, pool, submit
from perdure.store.regular_file import open_regular

BLOCK = 4096
BUFFERS = 3
SMALL_PIECE = 1024 * 1024
"""A file that fits into the buffers is written in pieces of this size while the rest is copied."""

ALLOCATE_BYTES = 64 * 1024 * 1024
DIRECT_READ_FROM = 256 * 1024

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class StagedWriter:
    """Appends at most `size` bytes to a new file, from buffers written in the background."""

    def __init__(self, path: str, size: int, before: Callable[[str, str], None]) -> None:
        self._path = path
        self._before = before
        self._fd = _open_direct(path)
        self._taken: list[mmap.mmap] = []
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._busy: deque[Future[None]] = deque()
        self._pool = pool("write", BUFFERS - 1)
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._offset = 0
        self._piece = STAGING_BYTES if size > BUFFERS * STAGING_BYTES else SMALL_PIECE
        self._expected = size
        self._allocated = 0

    def write(self, data: memoryview) -> None:
        """Copy `data` into staging memory; raises the error of an earlier background write."""
        done = 0
        while done < len(data):
            if self._current is None:
                self._current = self._next_buffer()
            buffer = self._current
            part = min(len(data) - done, self._piece - self._filled)
            copy_bytes(memoryview(buffer)[self._filled :], data[done : done + part])
            self._filled += part
            done += part
            if self._filled == self._piece:
                self._current, self._filled = None, 0
                self._submit(memoryview(buffer)[: self._piece], partial(self._free.put, buffer))

    def write_from(self, data: memoryview, release: Callable[[], None]) -> None:
        """`write` without a copy, if `data` is page-aligned and consists of whole blocks.

        `release` is called, from any thread, once the memory may be reused.
        """
        if self._current is not None or len(data) % BLOCK:
            self.write(data)
            release()
            return
        pieces = [data[i : i + self._piece] for i in range(0, len(data), self._piece)]
        left = iter(range(len(pieces) - 1, -1, -1))

        def written() -> None:
            if not next(left):  # of several threads one gets the zero
                release()

        for piece in pieces:
            self._submit(piece, written)

    def finish(self) -> int:
        """Write the rest; returns the descriptor of the file, which is complete and not yet synced."""
        total = self._offset + self._filled
        if self._current is not None:
            # O_DIRECT writes whole blocks; the file is cut back to its true length below.
            whole = -(-self._filled // BLOCK) * BLOCK
            rest = memoryview(self._current)[:whole]
            rest[self._filled :] = bytes(whole - self._filled)
            self._announce(whole)
            self._write_at(rest, self._offset)
        while self._busy:
            self._busy.popleft().result()
        with naming("truncate", self._path):
            os.ftruncate(self._fd, total)
        return self._fd

    def close(self) -> None:
        """Release the file and the buffers. May be called twice."""
        finish(self._busy)
        self._busy.clear()
        self._current = None
        while self._taken:
            give_buffer(self._taken.pop())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _next_buffer(self) -> mmap.mmap:
        if len(self._taken) < BUFFERS and self._free.empty():
            self._taken.append(take_buffer())
            return self._taken[-1]
        return self._free.get()

    def _submit(self, data: memoryview, release: Callable[[], None]) -> None:
        while len(self._busy) >= BUFFERS:
            self._busy.popleft().result()
        self._announce(len(data))
        job = submit(self._pool, self._write_at, data, self._offset)
        job.add_done_callback(lambda _: release())
        self._busy.append(job)
        self._offset += len(data)

    def _announce(self, length: int) -> None:
        needed = self._offset + length
        # In steps, because `expected` is an upper bound: deduplication may leave little to write.
        while self._allocated < needed:
            length = max(needed, min(self._expected, self._allocated + ALLOCATE_BYTES))
            # If this fails, the write that follows reports a full disk.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fallocate(self._fd, self._allocated, length - self._allocated)
            self._allocated = length
        self._before("write", self._path)

    def _write_at(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            with naming("write", self._path):
                written = os.pwrite(self._fd, data[done:], offset + done)
            if written % BLOCK and done + written < len(data):
                # A short write off the block grid (disk nearly full): the retry must be aligned.
                written -= written % BLOCK
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            done += written


def read_at(path: str, offset: int, target: memoryview) -> int:
    """Fill `target` from `offset` of a file; returns the bytes read, fewer only at its end.

    A large read bypasses the page cache unless its first block is in it. Checking that brings the
    block in, so if several processes read the same file, the first of them bypasses the cache.
    """
    fd = open_regular(path)
    try:
        done = 0
        whole = len(target) >= DIRECT_READ_FROM and not (offset | len(target)) % BLOCK
        if whole and not _is_cached(fd, offset):
            done = _read_direct(path, offset, target)
        while done < len(target):
            got = read_into(fd, target[done:], offset + done)
            if not got:
                break
            done += got
        return done
    finally:
        os.close(fd)


def drop_cached(path: str) -> None:
    """Take a file out of the page cache, so that its bytes are read from the disk again."""
    if hasattr(os, "posix_fadvise"):
        fd = open_regular(path)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _is_cached(fd: int, offset: int) -> bool:
    """Whether a byte is in the page cache; True as well if direct reads are not possible."""
    if not (_O_DIRECT and hasattr(os, "RWF_NOWAIT")):
        return True
    os.posix_fadvise(
        fd, offset, 0, os.POSIX_FADV_RANDOM
    )  # otherwise this would start to read ahead
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support the question
        return True
    finally:
        os.posix_fadvise(fd, offset, 0, os.POSIX_FADV_SEQUENTIAL)


def _read_direct(path: str, offset: int, target: memoryview) -> int:
    """Read whole blocks past the page cache; 0 if the file system or the memory does not allow it."""
    try:
        fd = open_regular(path, os.O_RDONLY | _O_DIRECT)
    except OSError:
        return 0
    try:
        return os.preadv(fd, [target], offset)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return 0
    finally:
        os.close(fd)


def _open_direct(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        return open_regular(path, flags | _O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return open_regular(path, flags)
