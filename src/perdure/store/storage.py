"""The storage seam: the few verbs that a backend offers, and what each of them promises.

Names are relative, with `/` between parts. A backend knows nothing of packs or manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable


class LostLock(OSError):
    """The lock that a change needs is not held any more; the change was not made."""


class Sink(Protocol):
    """A new object that is being written, front to back."""

    def write(self, data: memoryview) -> None:
        """Append `data`. The caller may reuse its memory once this returns."""

    def commit(self) -> None:
        """Make the object durable and visible, or raise; it survives power loss on return.

        Raises `FileExistsError` where the name is taken; the object there stays as it was.
        """

    def abort(self) -> None:
        """Drop what was written. May be called after a failed commit, and twice."""


@runtime_checkable
class AdoptingSink(Protocol):
    """What a `Sink` offers besides, if it can write from the caller's memory without a copy."""

    def write_from(self, data: memoryview, release: Callable[[], None]) -> None:
        """Append `data`, which lies in page-aligned memory that nobody changes until `release` is
        called: from any thread, and before `commit` or `abort` returns."""


class Storage(Protocol):
    """Durable named byte strings. Every failure is an `OSError` (`FileNotFoundError`, ...).

    `ConnectionError` means that nobody answered: nothing is known about the object, and it must not
    be taken for damaged. `perdure.testing.StorageConformance` tests all of this.
    """

    where: str
    """Path or URL that errors show."""

    def create(self, name: str, size: int) -> Sink:
        """Begin a new object of about `size` bytes; invisible until its commit.

        Of several that race for one name exactly one commits. An object store promises that for
        small objects only, manifests among them; large ones need names of their own.
        """
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object over an old one, atomically and durably."""

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
        """Names under `prefix` (which ends in `/`), unsorted, temporary ones included."""
        ...

    def move(self, name: str, target: str) -> None:
        """Rename an object, atomically and durably; `target` must be free."""

    def delete(self, name: str) -> None:
        """Remove an object; durable on return. A missing one is not an error."""

    def lock(self, name: str, owner: bytes) -> AbstractContextManager[None]:
        """Hold `name` against every other writer; released when the process dies.

        Opening, reading or copying the run directory elsewhere in the process does not release it,
        and a forked child does not hold it. While it is held, every change of this storage object
        first checks that it still is, and raises `LostLock` otherwise. Raises `BlockingIOError`
        whose `strerror` is the owner text of the holder.
        """
        ...

    def free_bytes(self) -> int | None:
        """Room that is left, None where that has no meaning."""
        ...


@runtime_checkable
class StreamingStorage(Protocol):
    """What a `Storage` offers beside, where a request takes long to be answered: a bucket."""

    streams: int
    """How many requests run at a time."""

    def read_each(self, name: str, offset: int, targets: Sequence[memoryview]) -> Iterator[int]:
        """Fill `targets`, which follow each other from `offset`, by one request.

        Yields the bytes of each as soon as they are there, fewer only at the end of the object.
        Raises what `Storage.read_into` raises.
        """
        ...


@runtime_checkable
class VersionedStorage(Protocol):
    """What a `Storage` also offers if a listing tells versions, so that nothing has to be read."""

    def versions(self, prefix: str) -> Mapping[str, str]:
        """Names under `prefix`, each with a text that differs for other bytes; "" if unknown."""
        ...


def create_whole(storage: Storage, name: str, data: bytes) -> None:
    """Create an object from bytes in memory; durable on return. Raises as `Sink.commit` does."""
    sink = storage.create(name, len(data))
    try:
        sink.write(memoryview(data))
        sink.commit()
    except BaseException:
        sink.abort()
        raise
