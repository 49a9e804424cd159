"""Writing one object of an object store: one request for a small one, parts for a large one."""

from __future__ import annotations

import errno
import queue
import secrets
import threading
from collections.abc import Callable, Iterator

from perdure.store.bucket import Bucket

MOST_PARTS = 9_000
"""S3 accepts 10,000 parts; some are left because `create` only gets an estimate of the size."""


class _Aborted(Exception):
    """Raised while obstore asks for parts, to end the upload."""


class CloudSink:
    """See `perdure.store.storage.Sink`. Nothing is visible before `commit`.

    An object of up to `single_put_bytes` is sent as a whole by `commit`, so that creating it is
    exclusive. A larger one is sent in parts, and whether its name is taken is checked just before the
    end. Two writers that create the same large name at the same time would both succeed, so such names
    must be unique.
    """

    def __init__(
        self, bucket: Bucket, name: str, size: int, before_commit: Callable[[], None]
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._size = size
        self._before_commit = before_commit
        self._held = bytearray()
        self._upload: _Upload | None = None

    def write(self, data: memoryview) -> None:
        if self._upload is not None:
            self._upload.write(bytes(data))
            return
        self._held += data
        if max(self._size, len(self._held)) > self._bucket.options.single_put_bytes:
            part = max(self._bucket.options.part_bytes, -(-self._size // MOST_PARTS))
            self._upload = _Upload(self._bucket, self._name, part)
            self._upload.write(bytes(self._held))
            self._held.clear()

    def commit(self) -> None:
        self._before_commit()
        if self._upload is None:
            self._bucket.create(self._name, bytes(self._held))
            self._held.clear()
        else:
            self._upload.finish()

    def abort(self) -> None:
        self._held.clear()
        if self._upload is not None:
            self._upload.abort()


class _Upload:
    """An upload in parts, for which obstore asks on a separate thread."""

    def __init__(self, bucket: Bucket, name: str, part_bytes: int) -> None:
        self._bucket = bucket
        self._name = name
        self._part_bytes = part_bytes
        self._attempt = secrets.token_hex(8)
        self._written = 0
        self._error: BaseException | None = None
        self._ended = False
        # None means the end, an exception the abort. Short, because obstore has a queue of its own.
        self._queue: queue.Queue[bytes | _Aborted | None] = queue.Queue(2)
        # A daemon, so that a process that exits without commit or abort does not wait for ever.
        self._thread = threading.Thread(target=self._run, name="perdure-upload", daemon=True)
        try:
            self._thread.start()
        except (
            RuntimeError
        ):  # while Python exits no thread can begin: `_end` uploads what was written
            self._queue.maxsize = 0

    def write(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._written += len(data)
        self._queue.put(data)

    def finish(self) -> None:
        if self._bucket.creator(self._name) is not None:
            self.abort()
            raise FileExistsError(
                errno.EEXIST, "exists already", f"{self._bucket.url}/{self._name}"
            )
        self._end(None)
        error = self._error
        if isinstance(error, ConnectionError) and self._is_ours():
            return  # the object arrived, and only the answer was lost
        if error is not None:
            raise error
        size = self._bucket.head(self._name)["size"]
        if size != self._written:
            self._bucket.delete(self._name)
            raise OSError(
                errno.EIO,
                f"wrote {self._written} bytes, the store has {size}; the object was removed, "
                f"write it again",
                f"{self._bucket.url}/{self._name}",
            )

    def abort(self) -> None:
        self._end(_Aborted())

    def _end(self, last: _Aborted | None) -> None:
        if not self._ended:
            self._ended = True
            self._queue.put(last)
            if self._thread.ident is None:
                self._run()
        if self._thread.ident is not None:
            self._thread.join()

    def _is_ours(self) -> bool:
        try:
            return self._bucket.creator(self._name) == self._attempt
        except OSError:
            return False

    def _run(self) -> None:
        try:
            self._bucket.upload(self._name, self._parts(), self._part_bytes, self._attempt)
        except _Aborted:
            return
        except BaseException as error:  # noqa: BLE001 (raised by the next write, or by finish)
            self._error = error
            while isinstance(
                self._queue.get(), bytes
            ):  # lets a writer continue that waits for the queue
                pass

    def _parts(self) -> Iterator[bytes]:
        while True:
            part = self._queue.get()
            if isinstance(part, _Aborted):
                raise part
            if part is None:
                return
            yield part
