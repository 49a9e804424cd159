"""A run directory on a local or shared file system, with every sync in place.

The order is always: temporary file, write, fsync the file, link it to its name, fsync the
directory. `before` is called before each operation that changes the disk, so that tests can fail
it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from perdure.errors import NotARunError, StoreError
from perdure.runtime.system import sync_file
from perdure.store.direct import StagedWriter, drop_cached, read_at
from perdure.store.failures import naming, retried
from perdure.store.file_lock import FileLock, acquire
from perdure.store.format import TEMP_SUFFIX
from perdure.store.regular_file import open_regular, read_whole, size_of
from perdure.store.storage import Sink, Storage

STAGED_FROM = 1024 * 1024
"""Objects of at least this many bytes are written through `StagedWriter`."""

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems answer that cannot sync a directory (some network file systems and FUSE)."""

T = TypeVar("T")


def _nothing(operation: str, path: str) -> None:
    """The default of `before`."""


class LocalStorage(Storage):
    """Objects are files below `root`; see `perdure.store.storage.Storage` for the contract.

    Args:
        root: Path of the run directory; it need not exist. It is made absolute.
        before: Called with the name of an operation and a path, before each change of the disk.

    Raises:
        StoreError: The path has no meaning, such as an empty one.
    """

    def __init__(
        self, root: str | os.PathLike[str], before: Callable[[str, str], None] = _nothing
    ) -> None:
        self.where = absolute_path(root)
        self.step = before
        self._places: dict[str, tuple[int, int]] = {}
        """The run directory and its folders as this object has found them first."""
        # If the path cannot be looked up now, the first operation reports that with its own text.
        with contextlib.suppress(OSError):
            self._know("")
        self._lock: FileLock | None = None

    def create(self, name: str, size: int) -> LocalSink:
        self.check_lock()
        self._make_parent(name)
        return LocalSink(self, name, size)

    def replace(self, name: str, data: bytes) -> None:
        self.check_lock()
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
        data = self._retried(name, lambda: read_whole(self.path(name)))
        # By now another run may be at this path, and its manifests have the same names.
        self._require_places(name)
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        return self._retried(name, lambda: read_at(self.path(name), offset, target))

    def keep_cached(self, name: str, offset: int) -> None:
        with contextlib.suppress(OSError):  # the read itself raises it
            read_at(self.path(name), offset, memoryview(bytearray(1)))  # what `read_at` goes by

    def drop_cached(self, name: str) -> None:
        with contextlib.suppress(OSError):
            drop_cached(self.path(name))

    def size(self, name: str) -> int:
        return self._retried(name, lambda: size_of(self.path(name)))

    def list(self, prefix: str) -> Iterator[str]:
        self._require_places(prefix)
        try:
            names = retried(lambda: os.listdir(self.path(prefix)))
        except FileNotFoundError as error:
            _require_target(error, self.path(prefix).rstrip("/"))
            return iter(())
        self._know(prefix)
        return iter([prefix + name for name in names])

    def make_folder(self, prefix: str) -> None:
        self._make_parent(prefix)

    def move(self, name: str, target: str) -> None:
        self.check_lock()
        self._make_parent(target)
        self._link(self.path(name), self.path(target))
        self.sync_parent(target)
        self.step("unlink", self.path(name))
        with contextlib.suppress(FileNotFoundError):  # without hard links it was renamed
            os.unlink(self.path(name))
        self.sync_parent(name)

    def delete(self, name: str) -> None:
        self.check_lock()
        self._require_places(name)
        self.step("unlink", self.path(name))
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            return
        self.sync_parent(name)

    @contextmanager
    def lock(self, name: str, owner: bytes) -> Iterator[None]:
        self._make_parent(name)
        lock = acquire(self.path(name), owner)
        self._lock = lock
        try:
            yield
        finally:
            self._lock = None
            lock.release()

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
        self.check_lock()
        status = os.statvfs(self.where)
        return status.f_bavail * status.f_frsize

    def path(self, name: str) -> str:
        return os.path.join(self.where, name)

    def check_lock(self) -> None:
        """Raise `LostLock` if this object took the writer's lock and does not hold it any more."""
        if self._lock is not None:
            self._lock.check()

    def sync_parent(self, name: str) -> None:
        """Make the directory entry of `name` durable."""
        self._sync_directory(os.path.dirname(self.path(name)))

    def write_synced(self, path: str, data: bytes) -> None:
        """Write a whole new file and sync it."""
        self.step("open", path)
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            view = memoryview(data)
            while view:
                self.step("write", path)
                with naming("write", path):
                    view = view[os.write(fd, view) :]
            self.sync(fd, path)
        finally:
            os.close(fd)

    def sync(self, fd: int, path: str) -> None:
        """Make the bytes of an open file durable."""
        self.step("fsync", path)
        with naming("fsync", path):
            sync_file(fd)

    def link(self, temporary: str, name: str) -> None:
        """Give a finished temporary file its name, unless that is taken; durable on return."""
        self.check_lock()
        self._link(temporary, self.path(name))
        with contextlib.suppress(FileNotFoundError):
            self.step("unlink", temporary)
            os.unlink(temporary)
        self.sync_parent(name)

    def remove_quietly(self, temporary: str) -> None:
        """Remove the file of a failed write; if that fails, the next writer removes it."""
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

    def _retried(self, name: str, work: Callable[[], T]) -> T:
        """`retried(work)`. A file is missing only if the directory and what links name are there."""
        try:
            return retried(work)
        except FileNotFoundError as error:
            self._require_places(name)
            _require_target(error, self.path(name), os.path.dirname(self.path(name)))
            raise

    def _know(self, folder: str) -> None:
        """Note which directory this is, unless that is known."""
        if folder not in self._places and (found := _identity(self.path(folder))) is not None:
            self._places[folder] = found

    def _require_places(self, name: str) -> None:
        """Raise `OSError` if the run directory or the folder of `name` is not the one that was
        found first: what was moved or unmounted must not be continued in an empty directory.
        """
        for folder in dict.fromkeys(("", name[: name.rfind("/") + 1])):
            known = self._places.get(folder)
            if known is not None and _identity(self.path(folder)) != known:
                raise OSError(
                    errno.ENODEV,
                    "the directory was moved, deleted, unmounted or replaced after it was opened; "
                    "nothing more is written to this path, and nothing is deleted. Bring it back",
                    self.path(folder),
                )

    def _make_parent(self, name: str) -> None:
        missing = []
        path = os.path.dirname(self.path(name))
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        self._require_places(name)
        for path in reversed(missing):
            self.step("mkdir", path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            self._sync_directory(os.path.dirname(path) or ".")
        self._know("")
        self._know(name[: name.rfind("/") + 1])

    def _sync_directory(self, path: str) -> None:
        self.step("fsync_dir", path)
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with naming("fsync of the directory", path):
                sync_file(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
            _warn_of_directories(self.where)
        finally:
            os.close(fd)


@cache
def _warn_of_directories(where: str) -> None:
    logging.getLogger(__name__).warning(
        "%s: this file system cannot sync directories. What is saved is complete, but after a power "
        "loss the newest checkpoints may be missing. Use a local file system if that matters.",
        where,
    )


def _require_target(error: FileNotFoundError, *paths: str) -> None:
    """Raise another `OSError` if one of `paths` is a link whose target is not there."""
    for path in paths:
        if os.path.islink(path) and not os.path.exists(path):
            raise OSError(
                errno.ENOLINK,
                f"a link to {os.readlink(path)}, which is not there; mount it, or bring it back",
                path,
            ) from error


class LocalSink(Sink):
    """A new file under a temporary name; a small one is written as a whole by `commit`."""

    def __init__(self, storage: LocalStorage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        # Unique, because two writers of one name must not share a temporary file.
        self._temporary = f"{storage.path(name)}.{os.urandom(4).hex()}{TEMP_SUFFIX}"
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

    def write_from(self, data: memoryview, release: Callable[[], None]) -> None:
        if self._staged is not None:
            self._staged.write_from(data, release)
        else:
            self._small += data
            release()

    def commit(self) -> None:
        try:
            if self._staged is not None:
                fd = self._staged.finish()
                self._storage.sync(fd, self._temporary)
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


def absolute_path(root: str | os.PathLike[str]) -> str:
    """The path of a run directory, independent of later changes of the working directory.

    Raises `NotARunError` for an empty path, and `StoreError` for one that has no meaning.
    """
    text = os.fsdecode(os.fspath(root))
    if not text:
        raise NotARunError(
            "expected the path or URL of a run directory, found an empty string. For the working "
            "directory write '.'."
        )
    if "\0" in text:
        raise StoreError(f"{text!r}: expected a path, found one with a NUL character.")
    expanded = os.path.expanduser(text)
    if text.startswith("~"):
        first = text.split("/")[0]
        if expanded == text:
            raise StoreError(
                f"{text}: there is no user {first[1:]!r}. Write ./{text} for that name."
            )
        if os.path.lexists(first):
            raise StoreError(
                f"{text}: a directory called {first!r} exists in {os.getcwd()}, so that the path has "
                f"two meanings. Write ./{text} for that one, or {expanded}."
            )
    try:
        return os.path.abspath(expanded)
    except FileNotFoundError:
        raise StoreError(
            f"{text}: the working directory of this process was removed, so that a relative path means "
            f"nothing. Name an absolute path, or change to another directory."
        ) from None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
