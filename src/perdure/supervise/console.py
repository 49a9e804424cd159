"""The output of a run: the lines of the workers, messages of the supervisor, and the final table."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from perdure.supervise.history import AttemptRecord, Summary
from perdure.supervise.output_writer import FLUSH_S, OutputWriter
from perdure.text import counted

_REDRAWN = re.compile(r"\r(?=[^\r\n])")  # a carriage return that something is drawn after


class Console:
    """Writes lines of workers to `out` (standard output) and messages to `err` (standard error).

    A stream that cannot be written (a full disk, a closed pipe) gets nothing more, with a message on
    the other stream: training continues, and the logs have every line. Files are written by a thread
    (see `OutputWriter`), so that no method but `flush` waits for a reader.

    Args:
        out: For the lines of the workers.
        err: For messages.
        stamp: Gives the time that begins each line; None for no times.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        stamp: Callable[[], str] | None = None,
    ) -> None:
        # A standard stream that was closed before Python started is None.
        self._out = out or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        self._err = err or sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        self._stamp = stamp
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
        stamp = "" if self._stamp is None else f"{self._stamp()} "
        prefix = f"[{worker}] {stamp}"
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
        stamp = "" if self._stamp is None else f"{self._stamp()} "
        self._write(self._err, f"perdure: {stamp}{_escaped(text)}\n")

    def summary(self, summary: Summary) -> None:
        """Print the table of attempts and the totals."""
        self._end_open_line()
        self._write(self._err, "".join(_escaped(line) + "\n" for line in describe(summary)))

    def is_behind(self) -> bool:
        """Whether the lines of the workers should wait for the reader of `out`, which reads."""
        return self._out in self._writers and self._writers[self._out][0].is_behind()

    def flush(self) -> None:
        """Wait until everything is written: 30 s at most, and 5 s for a reader that does not read."""
        deadline = time.monotonic() + FLUSH_S
        self._end_open_line()
        for stream, (writer, file) in self._writers.items():
            missing = writer.flush(deadline)
            if (error := writer.error(file)) is not None:
                self._report_lost(stream, error)
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
                writer, file = self._writers[stream]
                writer.write(file, _encoded(stream, text))
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


def _open_writers(*streams: TextIO) -> dict[TextIO, tuple[OutputWriter, int]]:
    """A writer for each file, with its descriptor; none for a stream in memory.

    Streams on one file (a terminal, `2>&1`) share a writer, which keeps their order.
    """
    writers: dict[tuple[int, int], OutputWriter] = {}
    opened: dict[TextIO, tuple[OutputWriter, int]] = {}
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # `_write` reports a stream that was closed
                stream.flush()
                file = stream.fileno()
                status = os.fstat(file)
                writer = writers.setdefault((status.st_dev, status.st_ino), OutputWriter())
                opened[stream] = writer, file
    return opened


def _escaped(text: str) -> str:
    """`text` with escapes in place of characters that a terminal obeys: a path may hold any."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _encoded(stream: TextIO, text: str) -> bytes:
    """`text`, with escapes for characters that the encoding of the stream does not have."""
    encoding = stream.encoding or "utf-8"
    try:
        return text.encode(encoding, stream.errors or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace")


def describe(summary: Summary) -> list[str]:
    """The table of attempts and the totals."""
    lines = [f"perdure: {summary.reason}", *attempt_table(summary.attempts, summary.repeated)]
    totals = [
        counted(summary.restarts, "restart"),
        f"{counted(sum(summary.repeated), 'step')} repeated",
    ]
    if summary.useful is not None and summary.goodput is not None:
        totals.append(f"{summary.seconds - summary.useful:.1f} of {summary.seconds:.1f} s lost")
        totals.append(f"goodput {summary.goodput:.3f}")
    lines.append(f"perdure: {', '.join(totals)}; logs in {summary.log_directory}")
    return lines


def attempt_table(attempts: Sequence[AttemptRecord], repeated: Sequence[int]) -> list[str]:
    """One line for each attempt, below a header; empty if there was none."""
    lines: list[str] = []
    if attempts:
        lines.append(
            f"{'attempt':>8} {'workers':>7} {'steps':>13} {'repeated':>8} {'s':>8}  ended by"
        )
    for attempt, again in zip(attempts, repeated, strict=True):
        steps = "-" if attempt.start is None else f"{attempt.start}-{attempt.end}"
        lines.append(
            f"{attempt.number:>8} {attempt.workers:>7} {steps:>13} {again:>8} "
            f"{attempt.seconds:>8.1f}  {attempt.cause}"
        )
    return lines
