"""The writer's lock on a local or shared file system: a lock on an open file.

Invariant: while `FileLock.check` passes, no other process holds the lock of that path. The lock
belongs to the open file description: opening the file elsewhere in this process does not release
it, and forked children close their copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import weakref

from perdure.runtime.system import IS_LINUX, at_fork, fcntl
from perdure.store.failures import naming
from perdure.store.regular_file import NotAFile, open_regular
from perdure.store.storage import LostLock

_ATTEMPTS = 3
# Only on Linux: other systems order the fields of `struct flock` in another way.
_OFD_SETLK: int | None = getattr(fcntl, "F_OFD_SETLK", None) if IS_LINUX else None
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS)

_guard = threading.RLock()
_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """The lock file at `path`, open and locked; `acquire` makes it."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._status = os.fstat(fd)

    def check(self) -> None:
        """Raise `LostLock` unless the locked file is still the one at its path."""
        if self._fd < 0:
            raise LostLock(
                errno.ESTALE, "the lock belongs to the process that this one was forked from"
            )
        if not self.is_in_place():
            raise LostLock(
                errno.ESTALE,
                "the lock file that this process holds is not there any more: the run directory was "
                "removed, moved, replaced or mounted over",
                self._path,
            )

    def is_in_place(self) -> bool:
        """Whether the path leads to the file that is locked."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), self._status)
        except (FileNotFoundError, NotADirectoryError):
            return False

    # `close` and `guard` are arguments because a lock that is never released ends with Python, when
    # the names of this module may be gone.
    def release(self, close=os.close, guard=_guard) -> None:
        """Release the lock; may be called often. A forked child leaves it to the parent."""
        with guard:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                close(fd)


def acquire(path: str, owner: bytes) -> FileLock:
    """Lock the file at `path`, created if needed, and write `owner` into it.

    Raises `BlockingIOError`, with the owner as `strerror`, if another writer holds it; another
    OSError if it cannot be opened or locked, or is a symbolic link.
    """
    for _ in range(_ATTEMPTS):
        lock = _open_locked(path)
        try:
            # The file may have been removed between opening and locking it.
            if lock.is_in_place():
                with naming("write", path):
                    os.pwrite(lock._fd, owner, 0)
                    os.ftruncate(lock._fd, len(owner))
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()
    raise OSError(errno.ESTALE, "the lock file was replaced again and again", path)


def _open_locked(path: str) -> FileLock:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with _guard:  # no fork in between: the child would keep the descriptor, and with it the lock
        try:
            fd = open_regular(path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                reason = "the lock file is a symbolic link; remove it"
                raise OSError(errno.ELOOP, reason, path) from None
            if isinstance(error, NotAFile):
                raise OSError(error.errno, f"{error.strerror}; remove it", path) from None
            raise
        try:
            with naming("lock", path):
                _lock(fd)
            lock = FileLock(path, fd)
            _open_locks.add(lock)
            return lock
        except BaseException as error:
            holder = os.pread(fd, 4096, 0).decode(errors="replace")
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(errno.EAGAIN, holder, path) from None
            raise


def _lock(fd: int) -> None:
    if _OFD_SETLK is not None:
        # l_type, l_whence, l_start, l_len (0: to the end), l_pid (0: the open file, not the process).
        whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(fd, _OFD_SETLK, whole_file)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _after_fork_in_child() -> None:
    for lock in list(_open_locks):
        with contextlib.suppress(OSError):
            lock.release()
    _guard.release()


at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_after_fork_in_child)
