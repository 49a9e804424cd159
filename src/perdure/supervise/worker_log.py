"""`WorkerLog`: the output of one worker on the disk.

Invariant: a disk that takes no more bytes ends nothing and is reported once; the log has a note in the
place of what is missing, and continues when there is space. A log that was removed is created again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

TAIL_BYTES = 4000


def remedy(error: OSError, path: Path) -> str:
    """What to do about a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there"
    return f"make {path.parent} a directory that can be written"


class WorkerLog:
    """A log file of its own for one worker in one attempt.

    Args:
        path: The file; an old one is replaced, a link is not followed.
        report: Is called with a message when output is lost.
        stamp: Gives the time that begins each line; None for lines as the worker wrote them.
    """

    def __init__(
        self, path: Path, report: Callable[[str], None], stamp: Callable[[], str] | None = None
    ) -> None:
        self._path = path
        self._report = report
        self._stamp = stamp
        self._file: int | None = None
        self._at_line_start = True
        self._lost, self._cause = 0, ""
        self._was_reported = False
        self._tail = b""
        self._write(b"")

    def write(self, data: bytes) -> None:
        """Append `data`; bytes that the disk does not take are counted."""
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._write(data if self._stamp is None else self._stamped(data, self._stamp))

    def tail(self) -> str:
        """The last bytes that were written, also if the disk did not take them."""
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Close the file, and report how much is missing in it."""
        if self._lost:
            self._write(b"")
        if self._lost:
            self._report(f"{self._path}: the last {self._lost} bytes are missing ({self._cause})")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, data: bytes) -> None:
        self._notice_removal()
        note = b""
        if self._lost:
            note = f"\n[perdure: {self._lost} bytes are missing here: {self._cause}]\n".encode()
        view = memoryview(note + data)
        done = 0
        try:
            if self._file is None:
                self._file = self._create()
            while done < len(view):
                done += os.write(self._file, view[done:])
            self._lost = 0
        except OSError as error:
            # A note that was cut off is written again with the next output.
            self._lost = (
                (self._lost if done < len(note) else 0) + len(data) - max(0, done - len(note))
            )
            self._cause = os.strerror(error.errno or 0)
            if not self._was_reported:
                self._was_reported = True
                self._report(
                    f"{self._path}: output of the worker cannot be written ({self._cause}); the run "
                    "continues, and the log says how many bytes are missing; "
                    f"{remedy(error, self._path)}"
                )

    def _create(self) -> int:
        """Open the file, without waiting for a pipe; its directory may have been removed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self._path, flags, 0o644)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, flags, 0o644)

    def _notice_removal(self) -> None:
        """Count what a log held that was removed while it was open."""
        if self._file is None:
            return
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            os.close(self._file)
            self._file = None
            self._lost, self._cause = self._lost + status.st_size, "the file was removed"

    def _stamped(self, data: bytes, stamp: Callable[[], str]) -> bytes:
        prefix = stamp().encode() + b" "
        ends_line = data.endswith(b"\n")
        text = data[:-1] if ends_line else data
        text = (prefix if self._at_line_start else b"") + text.replace(b"\n", b"\n" + prefix)
        self._at_line_start = ends_line
        return text + b"\n" if ends_line else text
