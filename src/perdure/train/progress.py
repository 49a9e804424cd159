"""Shows a run in lines. Nothing is written but when the loop calls `update`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

LINE_S = 10.0


class Progress:
    """Shows step, metrics, steps per second, time left and the last checkpoint of a run.

    Args:
        on: Whether to show anything.
        console: A text stream; None is standard error.
        every: Show after every so many steps. None: every ten seconds.
    """

    def __init__(self, on: bool, console: Any = None, every: int | None = None) -> None:
        self._on = on
        self._console: Any = sys.stderr if console is None else console
        self._every = every
        self._next = 0.0
        self._stop = 0.0
        self._from: tuple[float, int] = (0.0, 0)
        self._rate: float | None = None

    def begin(self, step: int, stop: float, now: float) -> None:
        """The run is at `step` and ends at `stop`, which is infinite if the data decide."""
        self._stop = stop
        self._from = (now, step)
        self._rate = None
        self._next = now + LINE_S

    def wants(self, now: float, at_multiple: Callable[[int], bool]) -> bool:
        """Whether to show something now; `at_multiple(n)` is True if a multiple of n was reached."""
        due = now >= self._next if self._every is None else at_multiple(self._every)
        return self._on and due

    def update(
        self, step: int, metrics: Mapping[str, float], saved: int | None, now: float
    ) -> None:
        seconds, steps = now - self._from[0], step - self._from[1]
        if seconds > 0 and steps > 0:
            self._rate = steps / seconds
            self._from = (now, step)
        self._next = now + LINE_S
        end = "" if self._stop == float("inf") else f"/{self._stop:.0f}"
        parts = [f"step {step}{end}"]
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        if self._rate is not None:
            parts.append(f"{self._rate:.3g} steps/s")
            if end:
                parts.append(f"left {timedelta(seconds=round((self._stop - step) / self._rate))}")
        if saved is not None:
            parts.append(f"saved {saved}")
        self.say("  ".join(parts))

    def say(self, text: str) -> None:
        if self._on:
            self._console.write(f"{text}\n")
            self._console.flush()
