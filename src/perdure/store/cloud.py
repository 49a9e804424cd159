"""A run directory in a bucket of S3 (or a compatible store), Google Cloud Storage or Azure.

The layout is that of a local directory. An object is visible only as a whole, and durable once the
store has answered. Creating the manifest is the commit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct

from perdure.runtime.process_stat import START, STATE, stat_fields
from perdure.store.aligned_buffers import copy_bytes
from perdure.store.bucket import Bucket, CloudOptions, version_of
from perdure.store.format import TEMP_SUFFIX
from perdure.store.storage import Entry, LostLock, Sink, Storage

COPY_BYTES = 8 * 1024 * 1024
MOST_PARTS = 9_000
"""S3 accepts 10,000 parts; some are left because `create` only gets an estimate of the size."""


class CloudStorage(Storage):
    """Objects below a URL; see `perdure.store.storage.Storage` for the contract.

    Every request is retried as `options` say, and raises `ConnectionError` if there is no answer. A
    process that was forked after the first use gets a `StoreError`. A move is a copy followed by a
    removal, so a crash between them leaves both objects. Creating an object is exclusive up to
    `options.single_put_bytes`; `CloudSink` describes larger ones.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        options: How to reach the store; by default the environment decides.
        clock: Returns the seconds since 1970 that the age of a lock is judged by; by default the
            clock of the store.

    Raises:
        MissingExtraError: obstore is not installed.
        StoreError: The URL cannot be opened. No request is sent yet.
    """

    lists_versions = True

    def __init__(
        self,
        url: str,
        options: CloudOptions | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._bucket = Bucket(url, options or CloudOptions())
        self._clock = clock
        self._lease: Lease | None = None
        self.where = self._bucket.url
        self.streams = self._bucket.options.concurrency

    def create(self, name: str, size: int) -> CloudSink:
        return CloudSink(self._bucket, name, size, self._check_lock)

    def replace(self, name: str, data: bytes) -> None:
        self._check_lock()
        self._bucket.put(name, data)

    def read(self, name: str) -> bytes:
        return self._bucket.get(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        (got,) = self.read_each(name, offset, [target])
        return got

    def read_each(self, name: str, offset: int, targets: Sequence[memoryview]) -> Iterator[int]:
        pieces = self._pieces(name, offset, sum(map(len, targets)))
        piece = memoryview(b"")
        for target in targets:
            done = 0
            while done < len(target):
                piece = piece or next(pieces, memoryview(b""))
                if not piece:
                    break
                part = min(len(piece), len(target) - done)
                copy_bytes(target[done:], piece[:part])
                piece = piece[part:]
                done += part
            yield done

    def size(self, name: str) -> int:
        return self._bucket.head(name)["size"]

    def list(self, prefix: str) -> Iterator[str]:
        return (name for name, _ in self._bucket.list(prefix))

    def entries(self, prefix: str, after: str = "") -> Mapping[str, Entry]:
        return dict(self._bucket.list(prefix, after or None))

    def move(self, name: str, target: str) -> None:
        self._check_lock()
        size = self.size(name)
        sink = self.create(target, size)
        try:
            buffer = memoryview(bytearray(min(size, COPY_BYTES)))
            done = 0
            while done < size:
                got = self.read_into(name, done, buffer[: size - done])
                if not got:
                    raise OSError(errno.EIO, f"ends at {done} of {size} bytes", name)
                sink.write(buffer[:got])
                done += got
            sink.commit()
        except BaseException:
            sink.abort()
            raise
        self._bucket.delete(name)

    def delete(self, name: str) -> None:
        self._check_lock()
        self._bucket.delete(name)

    @contextmanager
    def lock(self, name: str, owner: bytes) -> Iterator[None]:
        """Hold the lock object `name`; `perdure.store.cloud` says what that guarantees.

        The lock of a process that died on this host is free at once, any other after its lease.
        """
        lease = Lease(self._bucket, name, owner, self._clock)
        lease.acquire()
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None
            lease.release()

    def _pieces(self, name: str, offset: int, length: int) -> Iterator[memoryview]:
        try:
            yield from self._bucket.stream(name, offset, length)
        except (ConnectionError, FileNotFoundError):
            raise
        except OSError:
            # A range that begins at the end of the object or after it is an error of the protocol.
            if offset < self.size(name):
                raise

    def _check_lock(self) -> None:
        if self._lease is not None:
            self._lease.check()


class CloudSink(Sink):
    """See `perdure.store.storage.Sink`. Nothing is visible before `commit`.

    A small object is created exclusively. A large one is sent in parts, and two writers of one
    large name would both succeed, so such names must be unique.
    """

    def __init__(
        self, bucket: Bucket, name: str, size: int, before_commit: Callable[[], None]
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._size = size
        self._before_commit = before_commit
        self._held = bytearray()
        self._written = 0
        self._attempt = secrets.token_hex(8)
        self._upload: Any = None
        """The writer of obstore, which sends parts in the background."""

    def write(self, data: memoryview) -> None:
        if self._upload is None:
            self._held += data
            if max(self._size, len(self._held)) <= self._bucket.options.single_put_bytes:
                return
            part = max(self._bucket.options.part_bytes, -(-self._size // MOST_PARTS))
            self._upload = self._bucket.open_upload(self._name, part, self._attempt)
            data = memoryview(self._held)
        sent = bytes(data)
        self._written += len(sent)
        self._bucket.call("uploading", self._name, self._upload.write, sent)
        self._held = bytearray()

    def commit(self) -> None:
        self._before_commit()
        if self._upload is None:
            self._bucket.create(self._name, bytes(self._held))
            return
        where = f"{self._bucket.url}/{self._name}"
        if self._bucket.creator(self._name) is not None:
            raise FileExistsError(errno.EEXIST, "exists already", where)
        try:
            self._bucket.call("uploading", self._name, self._upload.close)
        except ConnectionError:
            with contextlib.suppress(OSError):
                if self._bucket.creator(self._name) == self._attempt:
                    return  # the object arrived, and only the answer was lost
            raise
        size = self._bucket.head(self._name)["size"]
        if size != self._written:
            self._bucket.delete(self._name)
            raise OSError(
                errno.EIO,
                f"wrote {self._written} bytes, the store has {size}; the object was removed, "
                f"write it again",
                where,
            )

    def abort(self) -> None:
        """See `Sink`. The store keeps the parts of an upload that was not completed, unseen."""
        self._held.clear()
        self._upload = None


RENEWALS_PER_LEASE = 3


class Holder(Struct, frozen=True):
    """The contents of a lock object. `renewals` makes the bytes of every version differ."""

    owner: str
    nonce: str
    lease_seconds: float
    renewals: int = 0
    process: tuple[str, str, str, int, str] | None = None
    """Host, boot, process name space, process id and start: equal for one process only."""


class Lease:
    """A lock object `name`, held from `acquire` to `release`.

    `now` is the time by which the age of a lock is judged: the clock of the store, so that the clocks
    of hosts do not matter.
    """

    def __init__(
        self, bucket: Bucket, name: str, owner: bytes, now: Callable[[], float] | None = None
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._now = now or self._store_time
        self._mine = Holder(
            owner=owner.decode(errors="replace"),
            nonce=secrets.token_hex(8),
            lease_seconds=bucket.options.lease_seconds,
            process=_this_process(),
        )
        self._version: Mapping[str, str] = {}
        self._renewed = 0.0
        self._lost: str | None = None
        self._busy = threading.Lock()
        self._released = threading.Event()
        self._pid = os.getpid()

    def acquire(self) -> None:
        """Take the lock; raises `BlockingIOError` with the owner text of a live holder."""
        started = _steady()
        data = msgspec.json.encode(self._mine) + b"\n"
        for _ in range(3):  # the holder may let go between two requests
            try:
                self._version = self._bucket.create(self._name, data)
                break
            except FileExistsError:
                pass
            try:
                version = version_of(before := self._bucket.head(self._name))
                holder = self._holder()
            except FileNotFoundError:
                continue
            modified = before["last_modified"].timestamp()
            if not (_is_dead(holder.process) or self._now() - modified > holder.lease_seconds):
                raise BlockingIOError(errno.EAGAIN, holder.owner, self._where)
            try:
                self._version = self._bucket.put_over(self._name, data, version)
                break
            except (BlockingIOError, FileNotFoundError):
                continue
            except OSError as error:
                if error.errno != errno.ENOTSUP:
                    raise
                raise BlockingIOError(
                    errno.EAGAIN,
                    f"{holder.owner.strip()}, whose lease ran out; this store cannot replace an object "
                    f"on a condition, so remove the lock by hand once that process is gone",
                    self._where,
                ) from error
        else:
            raise BlockingIOError(errno.EAGAIN, "its holder changed several times", self._where)
        self._renewed = started
        # While Python exits no thread can begin. Then `check` renews the lock, or finds it lost.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._keep, name="perdure-lock", daemon=True).start()

    def check(self) -> None:
        """Raise `LostLock` if this process lost the lock; the store is asked only if in doubt."""
        if self._lost is None and _steady() - self._renewed > self._mine.lease_seconds:
            self.renew()
        if self._lost is not None:
            raise LostLock(
                errno.ESTALE,
                f"the lock was taken over by {self._lost.strip()} when this process had not renewed "
                f"it for {self._mine.lease_seconds:g} s; nothing more is written. Stop one of the two",
                self._where,
            )

    def renew(self) -> None:
        """Renew the lock, or notice that it is lost; raises `ConnectionError` if there is no answer."""
        with self._busy:
            if self._lost is not None or self._released.is_set():
                return
            started = _steady()
            following = msgspec.structs.replace(self._mine, renewals=self._mine.renewals + 1)
            data = msgspec.json.encode(following) + b"\n"
            try:
                self._version = self._bucket.put_over(self._name, data, self._version)
            except OSError as error:
                # A store without conditional writes has nobody who takes over: the object must only
                # exist.
                if error.errno not in (errno.EAGAIN, errno.ENOENT, errno.ENOTSUP):
                    raise
                self._look(started)
                return
            self._mine = following
            self._renewed = started

    def release(self) -> None:
        """Release the lock. In a forked child, where it is the parent's, do nothing."""
        if os.getpid() != self._pid:
            return
        self._released.set()
        with self._busy, contextlib.suppress(ConnectionError):  # then it expires
            if self._lost is None and _steady() - self._renewed < self._mine.lease_seconds:
                self._bucket.delete(self._name)

    @property
    def _where(self) -> str:
        return f"{self._bucket.url}/{self._name}"

    def _keep(self) -> None:
        while not self._released.wait(self._mine.lease_seconds / RENEWALS_PER_LEASE):
            try:
                self.renew()
            except OSError:
                continue  # the next renewal may succeed; until then `check` raises

    def _look(self, started: float) -> None:
        """After a refused renewal: find out whether this process or another one holds the lock."""
        try:
            version = version_of(self._bucket.head(self._name))
            holder = self._holder()
        except FileNotFoundError:
            self._lost = "a process that removed it"
            return
        if holder.nonce == self._mine.nonce:
            self._version, self._renewed, self._mine = version, started, holder
        else:
            self._lost = holder.owner

    def _holder(self) -> Holder:
        data = self._bucket.get(self._name)
        try:
            return msgspec.json.decode(data, type=Holder)
        except (ValueError, RecursionError):  # `msgspec.DecodeError` is one
            return Holder(data.decode(errors="replace"), "", self._mine.lease_seconds)

    def _store_time(self) -> float:
        """The clock of the store, from the time of an object that is written for that."""
        probe = f"{self._name}.{self._mine.nonce}{TEMP_SUFFIX}"
        self._bucket.put(probe, b"")
        try:
            return self._bucket.head(probe)["last_modified"].timestamp()
        finally:
            self._bucket.delete(probe)


def _steady() -> float:
    """Seconds of a clock that also runs while the machine sleeps, like the clock of the store."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _this_process() -> tuple[str, str, str, int, str] | None:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        pid = os.getpid()
        return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), pid, _started(pid)
    except OSError:
        return None


def _is_dead(process: tuple[str, str, str, int, str] | None) -> bool:
    """Whether a process of this host, boot and name space has ended; False for any other process."""
    this = _this_process()
    if process is None or this is None or process[:3] != this[:3]:
        return False
    try:
        return _started(process[3]) != process[4]
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot."""
    fields = stat_fields(pid)
    if fields[STATE] in "ZX":
        raise FileNotFoundError(errno.ENOENT, "has ended", f"/proc/{pid}")
    return fields[START]
