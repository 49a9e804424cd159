"""The output of a run: the lines of the workers, messages of the supervisor, and the final table."""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

from perdure.supervise.attempts_log import RunHistory
from perdure.text import counted, printable_lines

QUEUE_BYTES = 64 * 2**20
"""Output that waits for its reader; what is written beyond it is dropped."""
PATIENCE_S = 5.0
"""A reader that takes nothing for so long does not read."""
FLUSH_S = 30.0
"""`flush` waits so long for a reader that reads."""
WRITE_BYTES = 16384
ATTEMPT_COLUMNS = ("attempt", "workers", "steps", "repeated", "s", "ended by")
_REDRAWN = re.compile(r"\r(?=[^\r\n])")  # a carriage return that something is drawn after


class OutputWriter:
    """A queue and the thread that writes it to one file, so that nobody waits for the reader.

    What is written is in order, and complete while no more than `QUEUE_BYTES` wait.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._changed = threading.Condition()
        self._queue = bytearray()
        self._taken = time.monotonic()  # when the reader last took something
        self._dropped = 0
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="perdure-output", daemon=True)

    def write(self, data: bytes) -> None:
        """Queue `data`, or drop it if the queue is full. Raises what an earlier write raised."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._dropped or len(self._queue) + len(data) > QUEUE_BYTES:
                self._dropped += len(data)
                return
            self._queue += data
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def flush(self, deadline: float) -> int:
        """Wait until all is written; returns how many bytes the reader does not get."""
        with self._changed:
            self._taken = time.monotonic()  # the reader may begin to read now
            while self._queue and time.monotonic() < min(deadline, self._taken + PATIENCE_S):
                self._changed.wait(0.05)
            return len(self._queue) + self._dropped

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                data = bytes(self._queue[:WRITE_BYTES])
            try:
                select.select([], [self._file], [])  # another process may have made it non-blocking
                written = os.write(self._file, data)
            except OSError as error:
                with self._changed:
                    self.error = error
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._taken = time.monotonic()
                del self._queue[:written]
                if self._dropped and len(self._queue) <= QUEUE_BYTES // 2:
                    self._queue += (
                        f"\nperdure: {self._dropped} bytes are missing here, because nobody read this "
                        "output; the logs have them\n"
                    ).encode()
                    self._dropped = 0
                self._changed.notify_all()


class Console:
    """Writes lines of workers to `out` (standard output) and messages to `err` (standard error).

    A stream that cannot be written gets nothing more, with a message on the other one: training
    continues. No method but `flush` waits for a reader.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        # A standard stream that was closed before Python started is None.
        self._out = out or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        self._err = err or sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        self._writers = _open_writers(self._out, self._err)
        self._lost: list[TextIO] = []
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        # The worker whose line has no end yet, what ends that line if another one writes, and whether
        # it is at the left border.
        self._open: int | None = None
        self._ending = "\n"
        self._at_border = False

    def line(self, worker: int, text: bytes) -> None:
        """Print a line of a worker with its end, or a part of a line that has not ended."""
        decoder = self._decoders.setdefault(
            worker, codecs.getincrementaldecoder("utf-8")(errors="replace")
        )
        is_whole = text.endswith(b"\n")
        part = decoder.decode(text, final=is_whole)
        if self._open != worker:
            self._end_open_line()
        begins = self._open is None
        prefix = f"[{worker}] "
        if (begins and part[:1] != "\r") or (self._at_border and part[:1] not in ("", "\r", "\n")):
            part = prefix + part
        redrawn = _REDRAWN.sub(lambda _: "\r" + prefix, part)
        if begins:
            self._ending = "\n"
        if "\r" in part and self._out.isatty():
            self._ending = "\r\x1b[K"  # a bar is drawn again soon, so nothing is lost
        self._open = None if is_whole else worker
        self._at_border = not is_whole and (part[-1:] == "\r" or (not part and self._at_border))
        self._write(self._out, redrawn)

    def message(self, text: str) -> None:
        """Print a message of the supervisor."""
        self._end_open_line()
        self._write(self._err, f"perdure: {printable_lines(text)}\n")

    def summary(self, run: RunHistory) -> None:
        """Print the table of attempts and the totals."""
        self._end_open_line()
        self._write(self._err, printable_lines("".join(f"{line}\n" for line in describe(run))))

    def flush(self) -> None:
        """Wait until everything is written: 30 s at most, and 5 s for a reader that does not read."""
        deadline = time.monotonic() + FLUSH_S
        self._end_open_line()
        for stream, writer in self._writers.items():
            missing = writer.flush(deadline)
            if writer.error is not None:
                self._report_lost(stream, writer.error)
            elif missing and stream is self._out:
                self._write(
                    self._err,
                    f"perdure: up to {missing} bytes of the standard output are not printed, because "
                    "nobody read them; the logs have them\n",
                )

    def _end_open_line(self) -> None:
        if self._open is not None:
            self._open = None
            self._write(self._out, self._ending)

    def _write(self, stream: TextIO, text: str) -> None:
        if stream in self._lost:
            return
        try:
            if stream in self._writers:
                encoding = stream.encoding or "utf-8"
                self._writers[stream].write(text.encode(encoding, "backslashreplace"))
            else:
                stream.write(text)
                stream.flush()
        except (OSError, ValueError) as error:  # a ValueError: the stream was closed
            self._report_lost(stream, error)

    def _report_lost(self, stream: TextIO, error: Exception) -> None:
        if stream in self._lost:
            return
        self._lost.append(stream)
        what = "the lines of the workers" if stream is self._out else "messages of perdure run"
        other = self._err if stream is self._out else self._out
        self._write(
            other,
            f"perdure: {what} cannot be written any more ({error}); the run continues, and "
            "its logs have the lines\n",
        )


def _open_writers(*streams: TextIO) -> dict[TextIO, OutputWriter]:
    """A writer for each stream that is a file; streams on one file share it, in order."""
    by_file: dict[tuple[int, int], OutputWriter] = {}
    writers: dict[TextIO, OutputWriter] = {}
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # `_write` reports a stream that was closed
                stream.flush()
                status = os.fstat(stream.fileno())
                key = status.st_dev, status.st_ino
                writers[stream] = by_file.setdefault(key, OutputWriter(stream.fileno()))
    return writers


def describe(run: RunHistory) -> list[str]:
    """The table of attempts, below the reason of the end, and the totals."""
    lines, rows = [f"perdure: {run.reason}"], attempt_rows(run)
    form = "{:>8} {:>7} {:>13} {:>8} {:>8}  {}"
    lines += [form.format(*row) for row in (ATTEMPT_COLUMNS, *rows)] if rows else []
    totals = [counted(run.restarts, "restart"), f"{counted(sum(run.repeated), 'step')} repeated"]
    if run.useful is not None and run.goodput is not None:
        totals.append(f"{run.seconds - run.useful:.1f} of {run.seconds:.1f} s lost")
        totals.append(f"goodput {run.goodput:.3f}")
    lines.append(f"perdure: {', '.join(totals)}; logs in {run.log_directory}")
    return lines


def attempt_rows(run: RunHistory) -> list[tuple[object, ...]]:
    """The rows of the table of attempts, with the one that has not ended."""
    rows: list[tuple[object, ...]] = []
    for each, again in zip(run.attempts, run.repeated, strict=True):
        steps = "-" if each.start is None else f"{each.start}-{each.end}"
        rows.append((each.number, each.workers, steps, again, round(each.seconds, 1), each.cause))
    if now := run.running:
        recorded = f"has not ended; step {now.get('step', 'none yet')}, recorded {now['time']}"
        rows.append((now.get("attempt", ""), now.get("workers", ""), "", "", "", recorded))
    return rows
