"""Writing one new file at the speed of the disk: page-aligned staging buffers and O_DIRECT.

Owns the buffers and the threads of one file. `write` copies into a staging buffer, full buffers are
written in the background, and `finish` returns only after every byte has reached the file (not yet
synced). A file system that refuses O_DIRECT gets the same buffers through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

BLOCK = 4096
STAGING_BYTES = 8 * 1024 * 1024
BUFFERS = 3
ALLOCATE_BYTES = 64 * 1024 * 1024

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class StagedWriter:
    """Appends to a new file at `path`; `before(operation, path)` is called ahead of each write.

    `size` is an upper bound of the bytes to come.
    """

    def __init__(self, path: str, size: int, before: Callable[[str, str], None]) -> None:
        self._path = path
        self._before = before
        self._fd = _open_direct(path)
        self._free = [mmap.mmap(-1, STAGING_BYTES) for _ in range(BUFFERS)]
        self._busy: list[tuple[Future[None], mmap.mmap]] = []
        self._pool = ThreadPoolExecutor(BUFFERS - 1, thread_name_prefix="perdure-write")
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._offset = 0
        self._expected = size
        self._allocated = 0

    def write(self, data: memoryview) -> None:
        """Copy `data` into staging memory; raises the error of an earlier background write."""
        at = 0
        while at < len(data):
            buffer = self._current or self._next_buffer()
            self._current = buffer
            part = min(len(data) - at, STAGING_BYTES - self._filled)
            memoryview(buffer)[self._filled : self._filled + part] = data[at : at + part]
            self._filled += part
            at += part
            if self._filled == STAGING_BYTES:
                self._submit(STAGING_BYTES)

    def finish(self) -> int:
        """Write what is left and return the descriptor, positioned nowhere, ready for fsync."""
        total = self._offset + self._filled
        if self._filled:
            # O_DIRECT writes whole blocks; the file is cut back to its true length below.
            whole = -(-self._filled // BLOCK) * BLOCK
            if self._current is not None:
                memoryview(self._current)[self._filled : whole] = bytes(whole - self._filled)
            self._submit(whole)
        while self._busy:
            self._collect()
        os.ftruncate(self._fd, total)
        return self._fd

    def close(self) -> None:
        """Release the file and the threads. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._busy.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _next_buffer(self) -> mmap.mmap:
        if not self._free:
            self._collect()
        return self._free.pop()

    def _submit(self, length: int) -> None:
        buffer, self._current = self._current, None
        assert buffer is not None
        self._preallocate(self._offset + length)
        self._before("write", self._path)
        future = self._pool.submit(self._write_at, buffer, length, self._offset)
        self._busy.append((future, buffer))
        self._offset += length
        self._filled = 0

    def _collect(self) -> None:
        future, buffer = self._busy.pop(0)
        future.result()
        self._free.append(buffer)

    def _preallocate(self, needed: int) -> None:
        # In steps, because `expected` is an upper bound: deduplication may leave little to write.
        while self._allocated < needed:
            length = max(needed, min(self._expected, self._allocated + ALLOCATE_BYTES))
            # A refusal decides nothing: the write that follows reports a full disk itself.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fallocate(self._fd, self._allocated, length - self._allocated)
            self._allocated = length

    def _write_at(self, buffer: mmap.mmap, length: int, offset: int) -> None:
        view = memoryview(buffer)[:length]
        done = 0
        while done < length:
            written = os.pwrite(self._fd, view[done:], offset + done)
            if written % BLOCK and done + written < length:
                # A short write off the block grid (disk nearly full): the retry must be aligned.
                written -= written % BLOCK
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            done += written


def _open_direct(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return os.open(path, flags, 0o644)
