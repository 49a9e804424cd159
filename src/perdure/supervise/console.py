"""The output of a run: the lines of the workers, messages of the supervisor, and the final table."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from perdure.supervise.history import AttemptRecord, Summary

_REDRAWN = re.compile(r"\r(?=[^\r\n])")  # a carriage return that something is drawn after


class Console:
    """Writes lines of workers to `out` (standard output) and messages to `err` (standard error).

    A stream that cannot be written (a full disk, a closed pipe) gets nothing more, with a message on
    the other stream: training continues, and the logs have every line.

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
        self._write(self._err, f"perdure: {stamp}{text}\n")

    def summary(self, summary: Summary) -> None:
        """Print the table of attempts and the totals."""
        self._end_open_line()
        self._write(self._err, "".join(line + "\n" for line in describe(summary)))

    def _end_open_line(self) -> None:
        if self._open is not None:
            self._open = None
            self._write(self._out, self._ending)

    def _write(self, stream: TextIO, text: str) -> None:
        if stream in self._lost:
            return
        try:
            _write_encodable(stream, text)
            stream.flush()
        except (OSError, ValueError) as error:  # a ValueError: the stream was closed
            self._lost.append(stream)
            _discard_buffer(stream)
            what = "the lines of the workers" if stream is self._out else "messages of perdure run"
            other = self._err if stream is self._out else self._out
            self._write(
                other,
                f"perdure: {what} cannot be written any more ({error}); the run continues, and "
                "its logs have the lines\n",
            )


def _write_encodable(stream: TextIO, text: str) -> None:
    """Write `text`, with escapes for characters that the encoding of the stream does not have."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _discard_buffer(stream: TextIO) -> None:
    """Redirect buffered text to /dev/null: writing it would fail again at the exit."""
    with contextlib.suppress(OSError, ValueError):  # the stream may have no file
        file = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file)
        os.close(null)


def describe(summary: Summary) -> list[str]:
    """The table of attempts and the totals."""
    lines = [f"perdure: {summary.reason}", *attempt_table(summary.attempts, summary.repeated)]
    totals = [f"{summary.restarts} restarts", f"{sum(summary.repeated)} steps repeated"]
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
