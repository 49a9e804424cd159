"""`OutputWriter`: writes to a file whose reader may be slow, or may not read at all.

Invariant: nobody waits for the reader but `flush`, and that for a limited time. What is written is
complete and in order while the reader reads.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque

QUEUE_BYTES = 16 * 2**20
"""With so much in the queue the workers wait for a reader that reads; twice as much is the limit."""
PATIENCE_S = 5.0
"""A reader that takes nothing for so long does not read."""
FLUSH_S = 30.0
"""`flush` waits so long for a reader that reads."""
WRITE_BYTES = 16384
IDLE_S = 1.0  # after which the thread ends until there is something to write


class OutputWriter:
    """A queue and the thread that writes it, for one file and all its descriptors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytearray]] = deque()
        self._size = 0  # bytes that the reader has not taken
        self._taken = 0.0  # when the reader took something, or the queue became longer than empty
        self._dropped = 0
        self._is_dropping = False
        self._errors: dict[int, OSError] = {}
        self._thread: threading.Thread | None = None

    def write(self, file: int, data: bytes) -> None:
        """Queue `data`, or drop it if the queue is full and its reader does not read.

        Raises:
            OSError: Earlier data could not be written.
        """
        with self._changed:
            if file in self._errors:
                raise self._errors[file]
            if not self._size:
                self._taken = time.monotonic()
            is_late = self._size >= QUEUE_BYTES and not self._is_read()
            if self._is_dropping or is_late or self._size >= 2 * QUEUE_BYTES:
                self._is_dropping = True
                self._dropped += len(data)
            elif data:
                self._append(file, data)

    def is_behind(self) -> bool:
        """Whether a reader that reads should be waited for, so that nothing is dropped."""
        with self._changed:
            return self._size >= QUEUE_BYTES and not self._is_dropping and self._is_read()

    def flush(self, deadline: float) -> int:
        """Wait until all is written or the reader does not read, at most until `deadline`.

        Returns:
            How many bytes the reader does not get.
        """
        with self._changed:
            if self._size:
                self._taken = time.monotonic()  # the reader may begin to read now
            while self._size and self._is_read() and time.monotonic() < deadline:
                self._changed.wait(0.05)
            return self._size + self._dropped

    def error(self, file: int) -> OSError | None:
        """Why data could not be written."""
        return self._errors.get(file)

    def _is_read(self) -> bool:
        return time.monotonic() - self._taken < PATIENCE_S

    def _append(self, file: int, data: bytes) -> None:
        if self._queue and self._queue[-1][0] == file and len(self._queue[-1][1]) < WRITE_BYTES:
            self._queue[-1][1].extend(data)
        else:
            self._queue.append((file, bytearray(data)))
        self._size += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="perdure-output", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                if not self._queue and not self._changed.wait(IDLE_S) and not self._queue:
                    self._thread = None
                    return
                if not self._queue:
                    continue
                file, data = self._queue.popleft()
            self._write(file, memoryview(data))

    def _write(self, file: int, data: memoryview) -> None:
        while data:
            try:
                written = os.write(file, data[:WRITE_BYTES])
            except BlockingIOError:  # a descriptor that another process has made non-blocking
                waiting = select.poll()
                waiting.register(file, select.POLLOUT)
                waiting.poll()
                continue
            except OSError as error:
                self._fail(file, error, len(data))
                return
            data = data[written:]
            with self._changed:
                self._taken = time.monotonic()
                self._size -= written
                if self._is_dropping and self._size <= QUEUE_BYTES // 2:
                    note = (
                        f"\nperdure: {self._dropped} bytes are missing here, because nobody read this "
                        "output; the logs have them\n"
                    )
                    self._is_dropping, self._dropped = False, 0
                    self._append(file, note.encode())
                self._changed.notify_all()

    def _fail(self, file: int, error: OSError, nbytes: int) -> None:
        with self._changed:
            self._errors[file] = error
            lost = [data for queued, data in self._queue if queued == file]
            self._queue = deque(entry for entry in self._queue if entry[0] != file)
            self._size -= nbytes + sum(map(len, lost))
            self._changed.notify_all()
