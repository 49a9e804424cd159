"""A run directory in a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure.

The layout is that of a directory. An object is visible only whole, and durable once the store has
answered; creating one where there is none is the commit.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.store.bucket import Bucket, CloudOptions
from perdure.store.lease import Lease
from perdure.store.upload import CloudSink

COPY_BYTES = 8 * 1024 * 1024


class CloudStorage:
    """Objects below a URL; see `perdure.store.storage.Storage` for the contract.

    `url` is `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`. Raises
    `StoreError` where obstore is missing or the URL cannot be opened; nothing is sent before the
    first use. Every request is tried again within bounds; when nobody answers it raises
    `ConnectionError`. Not usable in a process that was forked after the first use: `StoreError`.

    A move is a copy followed by a removal, so a crash between them leaves both. Creation is
    exclusive up to `options.single_put_bytes`; `CloudSink` says what holds beyond.
    """

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

    def create(self, name: str, size: int) -> CloudSink:
        return CloudSink(self._bucket, name, size, self._check_lock)

    def replace(self, name: str, data: bytes) -> None:
        self._check_lock()
        self._bucket.put(name, data)

    def read(self, name: str) -> bytes:
        return self._bucket.get(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if not target:
            return 0
        try:
            part = self._bucket.get_range(name, offset, len(target))
        except (ConnectionError, FileNotFoundError):
            raise
        except OSError:
            # A range that begins at the end or beyond is an error of the protocol.
            if offset < self.size(name):
                raise
            return 0
        target[: len(part)] = part
        return len(part)

    def size(self, name: str) -> int:
        return self._bucket.head(name)["size"]

    def list(self, prefix: str) -> Iterator[str]:
        return self._bucket.list(prefix)

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
        """Hold `name`; released on leaving, or when the process dies, after its lease at the latest.

        A holder that died on this host is noticed at once; any other when its lease has run out.
        `perdure.store.lease` says what the lock promises.
        """
        lease = Lease(self._bucket, name, owner, self._clock)
        lease.acquire()
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None
            lease.release()

    def free_bytes(self) -> int | None:
        return None

    def _check_lock(self) -> None:
        if self._lease is not None:
            self._lease.check()
