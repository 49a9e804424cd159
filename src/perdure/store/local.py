"""A run directory on a local or shared file system, with every sync in place.

The order is always: temporary file, write, fsync the file, link it to its name, fsync the
directory. A crash between any two of these leaves either no object or the whole one. `before` is
called ahead of every operation that changes the disk; tests count, record and fail them there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.store.direct import StagedWriter, read_at
from perdure.store.format import TEMP_SUFFIX

STAGED_FROM = 1024 * 1024
"""Objects of at least this many bytes go through the staging buffers."""

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_held: dict[tuple[int, int] | None, bytes] = {}
_held_guard = threading.Lock()


def _nothing(operation: str, path: str) -> None:
    """The default of `before`."""


class LocalStorage:
    """Objects are files below `root`; see `perdure.store.storage.Storage` for the contract."""

    def __init__(
        self, root: str | os.PathLike[str], before: Callable[[str, str], None] = _nothing
    ) -> None:
        self.where = os.fspath(root)
        self._before = before

    def create(self, name: str, size: int) -> LocalSink:
        self._make_parent(name)
        return LocalSink(self, name, size)

    def replace(self, name: str, data: bytes) -> None:
        self._make_parent(name)
        temporary = self.path(name) + TEMP_SUFFIX
        try:
            self.write_synced(temporary, data)
            self.step("rename", self.path(name))
            os.replace(temporary, self.path(name))
            self.sync_parent(name)
        except OSError:
            self.remove_quietly(temporary)
            raise

    def read(self, name: str) -> bytes:
        with open(self.path(name), "rb") as file:
            return file.read()

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        return read_at(self.path(name), offset, target)

    def size(self, name: str) -> int:
        return os.stat(self.path(name)).st_size

    def list(self, prefix: str) -> Iterator[str]:
        try:
            entries = list(os.scandir(self.path(prefix)))
        except FileNotFoundError:
            return iter(())
        return iter([prefix + entry.name for entry in entries if entry.is_file()])

    def move(self, name: str, target: str) -> None:
        self._make_parent(target)
        self._link(self.path(name), self.path(target))
        self.sync_parent(target)
        self.step("unlink", self.path(name))
        with contextlib.suppress(FileNotFoundError):  # where there are no hard links it was renamed
            os.unlink(self.path(name))
        self.sync_parent(name)

    def delete(self, name: str) -> None:
        self.step("unlink", self.path(name))
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            return
        self.sync_parent(name)

    @contextmanager
    def lock(self, name: str, owner: bytes) -> Iterator[None]:
        # POSIX record locks: gone with the process, and not inherited by a forked data worker that
        # outlives it. They do not exclude threads of one process, so `_held` does that.
        self._make_parent(name)
        path = self.path(name)
        with _held_guard:
            # Asked before opening: closing any descriptor of a locked file would drop the lock.
            if (holder := _held.get(_identity(path))) is not None:
                raise BlockingIOError(errno.EAGAIN, holder.decode(errors="replace"), path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                said = os.pread(fd, 4096, 0).decode(errors="replace")
                os.close(fd)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise BlockingIOError(errno.EAGAIN, said, path) from None
                raise
            identity = _identity(path)
            _held[identity] = owner
        # Names of its own: one that is never left ends with Python, when the module's are gone.
        guard, held, close = _held_guard, _held, os.close
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner, 0)
            yield
        finally:
            with guard:
                held.pop(identity, None)
                close(fd)

    def link_from(self, other: LocalStorage, name: str, target: str) -> bool:
        """Give an object of another directory a second name here, durably, without a copy.

        Returns False where the file systems do not allow it. Raises `FileNotFoundError` when the
        object is gone.
        """
        self._make_parent(target)
        self.step("link", self.path(target))
        try:
            os.link(other.path(name), self.path(target))
        except OSError as error:
            if error.errno in (*_NO_HARD_LINKS, errno.EXDEV, errno.EMLINK, errno.EACCES):
                return False
            raise
        self.sync_parent(target)
        return True

    def free_bytes(self) -> int | None:
        status = os.statvfs(self.where)
        return status.f_bavail * status.f_frsize

    def path(self, name: str) -> str:
        return os.path.join(self.where, name)

    def step(self, operation: str, path: str) -> None:
        """Announce the operation that comes next."""
        self._before(operation, path)

    def announces(self, before: Callable[[str, str], None]) -> bool:
        """Whether `before` is told of every operation."""
        return self._before == before

    def sync_parent(self, name: str) -> None:
        """Make the directory entry of `name` durable."""
        self._sync_directory(os.path.dirname(self.path(name)))

    def write_synced(self, path: str, data: bytes) -> None:
        """Write a whole new file and sync it."""
        self.step("open", path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                self.step("write", path)
                view = view[os.write(fd, view) :]
            self.step("fsync", path)
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, temporary: str, name: str) -> None:
        """Give a finished temporary file its name, unless that is taken; durable on return."""
        self._link(temporary, self.path(name))
        with contextlib.suppress(FileNotFoundError):
            self.step("unlink", temporary)
            os.unlink(temporary)
        self.sync_parent(name)

    def remove_quietly(self, temporary: str) -> None:
        """Remove the file of a failed write; one that stays is cleared by the next writer."""
        self.step("unlink", temporary)
        with contextlib.suppress(OSError):
            os.unlink(temporary)

    def _link(self, source: str, target: str) -> None:
        self.step("link", target)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if os.path.exists(target):
                raise FileExistsError(errno.EEXIST, "exists already", target) from None
            os.rename(source, target)

    def _make_parent(self, name: str) -> None:
        missing = []
        path = os.path.dirname(self.path(name))
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            self.step("mkdir", path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            self._sync_directory(os.path.dirname(path) or ".")

    def _sync_directory(self, path: str) -> None:
        self.step("fsync_dir", path)
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class LocalSink:
    """A new file under a temporary name; small ones are held back and written at once."""

    def __init__(self, storage: LocalStorage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        # Of its own: two writers of one name must not meet in one temporary file either.
        self._temporary = f"{storage.path(name)}.{secrets.token_hex(4)}{TEMP_SUFFIX}"
        self._small = bytearray()
        self._staged: StagedWriter | None = None
        if size >= STAGED_FROM:
            storage.step("open", self._temporary)
            self._staged = StagedWriter(self._temporary, size, storage.step)

    def write(self, data: memoryview) -> None:
        if self._staged is not None:
            self._staged.write(data)
        else:
            self._small += data

    def commit(self) -> None:
        try:
            if self._staged is not None:
                fd = self._staged.finish()
                self._storage.step("fsync", self._temporary)
                os.fsync(fd)
                self._staged.close()
            else:
                self._storage.write_synced(self._temporary, bytes(self._small))
            self._storage.link(self._temporary, self._name)
        except OSError:
            self.abort()
            raise

    def abort(self) -> None:
        if self._staged is not None:
            self._staged.close()
        self._storage.remove_quietly(self._temporary)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
