"""What a run prints: the workers' lines with their number, its own statements, the table at the end."""

from __future__ import annotations

import sys
from typing import TextIO

from perdure.supervise.record import Summary


class Console:
    """Lines of workers go to `out`, statements of the supervisor to `err`; by default the standard ones."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def line(self, worker: int, text: bytes) -> None:
        """One line of a worker."""
        self._out.write(f"[{worker}] {text.decode(errors='replace')}\n")
        self._out.flush()

    def say(self, text: str) -> None:
        """A statement of the supervisor."""
        self._err.write(f"perdure: {text}\n")
        self._err.flush()

    def summary(self, summary: Summary) -> None:
        """Everything that happened, once it is over."""
        for line in describe(summary):
            self._err.write(line + "\n")
        self._err.flush()


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
