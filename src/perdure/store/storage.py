"""`Storage`: what each operation of a backend guarantees; and one in memory, the reference.

Names are relative, with `/` between parts. A backend knows nothing of packs or manifests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TypeVar

from perdure.errors import CorruptionError

T = TypeVar("T")


class LostLock(OSError):
    """The lock that a change needs was lost; the change was not made."""


class Entry(NamedTuple):
    """What a listing says: size (None if unknown), and a version that differs if the bytes do."""

    size: int | None
    version: str


class Sink(Protocol):
    """A new object that is being written, front to back. A storage derives its sinks from this."""

    def write(self, data: memoryview) -> None:
        """Append `data`. The caller may reuse the memory once this returns."""

    def write_from(self, data: memoryview, release: Callable[[], None]) -> None:
        """Append `data`, which lies in page-aligned memory that nobody changes until `release` is
        called: from any thread, and before `commit` or `abort` returns."""
        self.write(data)
        release()

    def commit(self) -> None:
        """Make the object durable and visible, or raise; it survives power loss on return.

        Raises `FileExistsError` if the name is taken; the object there stays as it was.
        """

    def abort(self) -> None:
        """Discard what was written. May be called after a failed commit, and twice."""


class Storage(Protocol):
    """Durable named byte strings. Every failure is an `OSError` (`FileNotFoundError`, ...).

    `ConnectionError` means that there was no answer: nothing is known about the object, and it must
    not be treated as damaged. A storage derives from this class, whose last methods suit most of them.
    `perdure.testing.StorageConformance` tests all of this.
    """

    where: str
    """Path or URL that errors show."""
    streams: int = 0
    """How many requests a load sends at a time, each for many chunks, if a request takes long."""
    lists_versions: bool = False
    """Whether `entries` has sizes and versions, so that objects need not be asked one by one."""

    def create(self, name: str, size: int) -> Sink:
        """Begin a new object of about `size` bytes, which is invisible until its commit.

        If several writers create the same name, exactly one commits. An object store guarantees that
        for small objects only, such as manifests; large ones need unique names.
        """
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, replacing any older one, atomically and durably."""

    def read(self, name: str) -> bytes:
        """The whole object."""
        ...

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset`; returns the bytes read, fewer only at the end."""
        ...

    def size(self, name: str) -> int:
        """Bytes of an object."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Names under `prefix` (which ends in `/`), unsorted, whatever has them."""
        ...

    def move(self, name: str, target: str) -> None:
        """Rename an object, atomically and durably; no object may have the name `target`."""

    def delete(self, name: str) -> None:
        """Remove an object; durable on return. A missing one is not an error."""

    def lock(self, name: str, owner: bytes) -> AbstractContextManager[None]:
        """Hold the lock `name`, which excludes every other writer and ends with the process.

        Opening, reading or copying the run directory elsewhere in the process does not release it,
        and a forked child does not hold it. While it is held, every change through this storage
        object first checks that the lock was not lost, and raises `LostLock` otherwise.

        Args:
            name: The name of the lock object.
            owner: A text that others see while the lock is held.

        Raises:
            BlockingIOError: Another writer holds the lock; `strerror` is its owner text.
        """
        ...

    def free_bytes(self) -> int | None:
        """Free space, None if that has no meaning."""
        return None

    def entries(self, prefix: str, after: str = "") -> Mapping[str, Entry]:
        """Every name under `prefix` that follows `after` in code point order, with its entry."""
        unknown = Entry(None, "")
        return {name: unknown for name in self.list(prefix) if name > after}

    def read_each(self, name: str, offset: int, targets: Sequence[memoryview]) -> Iterator[int]:
        """Fill `targets` with bytes that follow each other from `offset`.

        Yields the number of bytes of each as soon as it is filled; fewer only at the end of the
        object. Raises as `read_into` does.
        """
        for target in targets:
            yield self.read_into(name, offset, target)
            offset += len(target)

    def make_folder(self, prefix: str) -> None:
        """Make the directory for `prefix`, which ends in `/`, if the storage has directories.

        It is durable on return.
        """

    def keep_cached(self, name: str, offset: int) -> None:
        """Let the next read at `offset` go through the page cache, and raise no `OSError`.

        For bytes that other processes of this machine read, too: the storage then reads them once.
        """

    def drop_cached(self, name: str) -> None:
        """Let the next reads of an object come from the disk, and raise no `OSError`."""


class _MemorySink(Sink):
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def commit(self) -> None:
        with self._storage.mutex:
            if self._name in self._storage.objects:
                raise FileExistsError(17, "exists already", self._name)
            self._storage.objects[self._name] = bytes(self._data)

    def abort(self) -> None:
        self._data.clear()


class MemoryStorage(Storage):
    """Keeps every object in the dict `objects`. Nothing survives the process."""

    def __init__(self) -> None:
        self.where = "memory:"
        self.objects: dict[str, bytes] = {}
        self.mutex = threading.Lock()
        self._locks: dict[str, bytes] = {}

    def create(self, name: str, size: int) -> _MemorySink:
        return _MemorySink(self, name)

    def replace(self, name: str, data: bytes) -> None:
        with self.mutex:
            self.objects[name] = bytes(data)

    def read(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise FileNotFoundError(2, "no such object", name) from None

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        part = self.read(name)[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def size(self, name: str) -> int:
        return len(self.read(name))

    def list(self, prefix: str) -> Iterator[str]:
        with self.mutex:
            return iter([name for name in self.objects if name.startswith(prefix)])

    def move(self, name: str, target: str) -> None:
        with self.mutex:
            if target in self.objects:
                raise FileExistsError(17, "exists already", target)
            if name not in self.objects:
                raise FileNotFoundError(2, "no such object", name)
            self.objects[target] = self.objects.pop(name)

    def delete(self, name: str) -> None:
        with self.mutex:
            self.objects.pop(name, None)

    @contextmanager
    def lock(self, name: str, owner: bytes) -> Iterator[None]:
        with self.mutex:
            if name in self._locks:
                raise BlockingIOError(11, self._locks[name].decode(), name)
            self._locks[name] = owner
        try:
            yield
        finally:
            with self.mutex:
                del self._locks[name]


def confirmed(storage: Storage, name: str, work: Callable[[], T]) -> T:
    """What `work` returns, which checks `name`; after damage again, past the page cache."""
    try:
        return work()
    except CorruptionError:
        storage.drop_cached(name)
        return work()


def create_whole(storage: Storage, name: str, *parts: bytes | memoryview) -> None:
    """Create an object from bytes in memory; durable on return. Raises as `Sink.commit` does."""
    sink = storage.create(name, sum(map(len, parts)))
    try:
        for part in parts:
            sink.write(memoryview(part))
        sink.commit()
    except BaseException:
        sink.abort()
        raise
