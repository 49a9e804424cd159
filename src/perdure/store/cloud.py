"""A run directory in a bucket of S3 (or a compatible store), Google Cloud Storage or Azure.

The layout is that of a local directory. An object is visible only as a whole, and durable once the
store has answered. Creating the manifest is the commit.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perdure.store.aligned_buffers import copy_bytes
from perdure.store.bucket import Bucket, CloudOptions
from perdure.store.lease import Lease
from perdure.store.storage import Entry, Sink, Storage

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
        """Hold the lock object `name`; `perdure.store.lease` says what that guarantees.

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
            if not self._is_ours():
                raise
            return  # the object arrived, and only the answer was lost
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

    def _is_ours(self) -> bool:
        try:
            return self._bucket.creator(self._name) == self._attempt
        except OSError:
            return False
