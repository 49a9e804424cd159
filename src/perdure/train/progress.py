"""Shows a run: a bar on a terminal, lines elsewhere.

Invariant: the screen is drawn only when the loop calls `update`; no thread runs beside the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

BAR_S = 0.5
LINE_S = 10.0


class Progress:
    """Shows step, metrics, steps per second, time left and the last checkpoint of a run.

    Args:
        mode: "bar", "lines", "off", or "auto": a bar if `console` is a terminal, else lines.
        console: A text stream or a `rich` console; None is standard error.
        every: Show after every so many steps. None: lines every ten seconds, a bar every half second.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "lines", "off"] = "auto",
        console: Any = None,
        every: int | None = None,
    ) -> None:
        self._console: Any = console if console is not None else sys.stderr
        if mode == "auto":
            mode = "bar" if _is_terminal(self._console) else "lines"
        self.mode = mode
        self._every = every
        self._wait = float("inf") if mode == "off" else BAR_S if mode == "bar" else LINE_S
        self._next = 0.0
        self._stop = 0.0
        self._from: tuple[float, int] = (0.0, 0)
        self._rate: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def begin(self, step: int, stop: float, now: float) -> None:
        """The run is at `step` and ends at `stop`, which is infinite if the data decide."""
        self._stop = stop
        self._from = (now, step)
        self._rate = None
        self._next = now + self._wait
        if self.mode == "bar":
            self._bar, self._task = _make_bar(self._console, step, stop)

    def wants(self, now: float, at_multiple: Callable[[int], bool]) -> bool:
        """Whether to show something now; `at_multiple(n)` is True if a multiple of n was reached."""
        if self.mode == "off":
            return False
        if self._every is None:
            return now >= self._next
        return at_multiple(self._every)

    def update(
        self, step: int, metrics: Mapping[str, float], saved: int | None, now: float
    ) -> None:
        """Show the step, the metrics, and the last saved step."""
        seconds, steps = now - self._from[0], step - self._from[1]
        if seconds > 0 and steps > 0:
            self._rate = steps / seconds
            self._from = (now, step)
        self._next = now + self._wait
        text = self._line(step, metrics, saved)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
            self._bar.refresh()
        elif self.mode == "lines":
            end = "" if self._stop == float("inf") else f"/{self._stop:.0f}"
            self._write(f"step {step}{end}  {text}")

    def say(self, text: str) -> None:
        """Print one line in any mode but "off"."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self.mode != "off":
            self._write(text)

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None

    def _line(self, step: int, metrics: Mapping[str, float], saved: int | None) -> str:
        parts = [f"{name} {value:.4g}" for name, value in metrics.items()]
        if self._rate is not None:
            parts.append(f"{self._rate:.3g} steps/s")
            if self._stop < float("inf"):
                seconds = round((self._stop - step) / self._rate)
                parts.append(f"left {timedelta(seconds=seconds)}")
        if saved is not None:
            parts.append(f"saved {saved}")
        return "  ".join(parts)

    def _write(self, text: str) -> None:
        if hasattr(self._console, "print"):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._console.write(f"{text}\n")
            self._console.flush()


def _is_terminal(console: Any) -> bool:
    if hasattr(console, "is_terminal"):
        return bool(console.is_terminal)
    return bool(getattr(console, "isatty", lambda: False)())


def _make_bar(console: Any, step: int, stop: float) -> tuple[Any, Any]:
    from rich.console import Console  # slow to import, and only needed for a bar
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    screen = console if isinstance(console, Console) else Console(file=console)
    bar = Bar(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.fields[text]}", markup=False),
        console=screen,
        auto_refresh=False,
    )
    task = bar.add_task(
        "training", total=None if stop == float("inf") else stop, completed=step, text=""
    )
    bar.start()
    return bar, task
