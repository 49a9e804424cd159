"""What a run prints: the workers' lines with their number, its own statements, the table at the end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from perdure.supervise.history import Summary


class Console:
    """Lines of workers go to `out`, by default standard output; statements to `err`, standard error.

    One that cannot be written to (a full disk, a reader that has gone) gets nothing more, and the other
    one says so: training does not end because nobody listens, and the logs have every line.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._lost: list[TextIO] = []

    def line(self, worker: int, text: bytes) -> None:
        """One line of a worker."""
        self._write(self._out, f"[{worker}] {text.decode(errors='replace')}\n")

    def say(self, text: str) -> None:
        """A statement of the supervisor."""
        self._write(self._err, f"perdure: {text}\n")

    def summary(self, summary: Summary) -> None:
        """Everything that happened, once it is over."""
        self._write(self._err, "".join(line + "\n" for line in describe(summary)))

    def _write(self, stream: TextIO, text: str) -> None:
        if stream in self._lost:
            return
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            self._lost.append(stream)
            _let_go(stream)
            what = "the lines of the workers" if stream is self._out else "what is said here"
            other = self._err if stream is self._out else self._out
            self._write(
                other,
                f"perdure: {what} cannot be written any more ({error}); the run goes on, and its "
                "logs have the lines\n",
            )


def _let_go(stream: TextIO) -> None:
    """What is still in the buffer would be tried again at the exit, and fail it."""
    with contextlib.suppress(OSError):  # one that has no file has no such exit
        file = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file)
        os.close(null)


def describe(summary: Summary) -> list[str]:
    """The table of attempts, and the sums."""
    lines = [f"perdure: {summary.reason}"]
    if summary.attempts:
        lines.append(
            f"{'attempt':>8} {'workers':>7} {'steps':>13} {'repeated':>8} {'s':>8}  ended by"
        )
    for each, repeated in zip(summary.attempts, summary.repeated, strict=True):
        steps = "-" if each.start is None else f"{each.start}-{each.end}"
        lines.append(
            f"{each.number:>8} {each.workers:>7} {steps:>13} {repeated:>8} {each.seconds:>8.1f}  "
            f"{each.cause}"
        )
    sums = [f"{summary.restarts} restarts", f"{sum(summary.repeated)} steps repeated"]
    if summary.useful is not None and summary.goodput is not None:
        sums.append(f"{summary.seconds - summary.useful:.1f} of {summary.seconds:.1f} s lost")
        sums.append(f"goodput {summary.goodput:.3f}")
    lines.append(f"perdure: {', '.join(sums)}; logs in {summary.log_directory}")
    return lines
