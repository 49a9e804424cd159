"""The output of a run: the lines of the workers, messages of the supervisor, and the final table."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from perdure.supervise.history import Summary


class Console:
    """Writes lines of workers to `out` (standard output) and messages to `err` (standard error).

    A stream that cannot be written (a full disk, a closed pipe) gets nothing more, with a message on
    the other stream: training continues, and the logs have every line.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._lost: list[TextIO] = []

    def line(self, worker: int, text: bytes) -> None:
        """Print one line of a worker."""
        self._write(self._out, f"[{worker}] {text.decode(errors='replace')}\n")

    def message(self, text: str) -> None:
        """Print a message of the supervisor."""
        self._write(self._err, f"perdure: {text}\n")

    def summary(self, summary: Summary) -> None:
        """Print the table of attempts and the totals."""
        self._write(self._err, "".join(line + "\n" for line in describe(summary)))

    def _write(self, stream: TextIO, text: str) -> None:
        if stream in self._lost:
            return
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            self._lost.append(stream)
            _discard_buffer(stream)
            what = "the lines of the workers" if stream is self._out else "messages of perdure run"
            other = self._err if stream is self._out else self._out
            self._write(
                other,
                f"perdure: {what} cannot be written any more ({error}); the run continues, and "
                "its logs have the lines\n",
            )


def _discard_buffer(stream: TextIO) -> None:
    """Redirect buffered text to /dev/null: writing it would fail again at the exit."""
    with contextlib.suppress(OSError):  # the stream may have no file
        file = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file)
        os.close(null)


def describe(summary: Summary) -> list[str]:
    """The table of attempts and the totals."""
    lines = [f"perdure: {summary.reason}"]
    if summary.attempts:
        lines.append(
            f"{'attempt':>8} {'workers':>7} {'steps':>13} {'repeated':>8} {'s':>8}  ended by"
        )
    for attempt, repeated in zip(summary.attempts, summary.repeated, strict=True):
        steps = "-" if attempt.start is None else f"{attempt.start}-{attempt.end}"
        lines.append(
            f"{attempt.number:>8} {attempt.workers:>7} {steps:>13} {repeated:>8} "
            f"{attempt.seconds:>8.1f}  {attempt.cause}"
        )
    totals = [f"{summary.restarts} restarts", f"{sum(summary.repeated)} steps repeated"]
    if summary.useful is not None and summary.goodput is not None:
        totals.append(f"{summary.seconds - summary.useful:.1f} of {summary.seconds:.1f} s lost")
        totals.append(f"goodput {summary.goodput:.3f}")
    lines.append(f"perdure: {', '.join(totals)}; logs in {summary.log_directory}")
    return lines
