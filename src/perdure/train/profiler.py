"""`Profiler`: measures where the time of a few steps goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

from perdure.errors import TrainError, missing_extra
from perdure.train.metrics import scalars
from perdure.train.trainer import Hook, Trainer

DIRECTORY = "profile"


class Profiler(Hook):
    """Profiles a few steps. It slows down these steps, and no others.

    Args:
        first: First step to profile; the very first steps of a run compile.
        steps: Number of steps.
        tool: "jax" and "torch" write a trace of the framework's own profiler, for TensorBoard or
            Perfetto. "time" needs no framework: it waits for each step and prints a table of the
            seconds in steps and between them when training ends.
        directory: Of the trace; None is `profile` beside the summaries.
        clock: Returns seconds.

    Raises:
        TrainError: An argument cannot be used, or there is no local directory for the trace.
    """

    def __init__(
        self,
        first: int = 10,
        steps: int = 10,
        tool: Literal["time", "jax", "torch"] = "time",
        directory: str | Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if tool not in ("time", "jax", "torch"):
            raise TrainError(f"tool: expected 'time', 'jax' or 'torch', found {tool!r}.")
        if first < 0 or steps < 1:
            raise TrainError(
                f"expected a first step of at least 0 and at least 1 step, found {first} and {steps}."
            )
        self._first, self._last = first, first + steps
        self._tool = tool
        self._directory = None if directory is None else Path(directory)
        self._clock = clock
        self._running: Any = None
        self._in: list[float] = []
        self._between: list[float] = []
        self._mark: float | None = None

    def begin(self, trainer: Trainer) -> None:
        self._in, self._between, self._mark = [], [], None
        if self._tool != "time" and self._directory is None:
            summaries = trainer.summaries.directory
            if summaries is None:
                raise TrainError(
                    "Profiler: expected a local directory for the trace, found none; pass `directory`."
                )
            self._directory = summaries / DIRECTORY

    def before_step(self, trainer: Trainer) -> None:
        if not self._first <= trainer.step < self._last:
            return
        if self._tool != "time":
            if self._running is None:
                self._running = _start(self._tool, str(self._directory))
            return
        now = self._clock()
        if self._mark is not None:
            self._between.append(now - self._mark)
        self._mark = now

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        if self._running is not None:
            if trainer.step >= self._last:
                scalars(logs)  # waits for the step
                self._stop()
        elif self._mark is not None:
            scalars(logs)
            now = self._clock()
            self._in.append(now - self._mark)
            self._mark = now if trainer.step < self._last else None

    def end(self, trainer: Trainer) -> None:
        self._stop()
        if text := self.table():
            trainer.say(text)

    def table(self) -> str:
        """Milliseconds in the steps and between them, as text; empty if no step was profiled."""
        rows: Mapping[str, list[float]] = {"step": self._in, "between steps": self._between}
        lines = [
            f"{name:<14}{len(times):>6}{median(times) * 1e3:>12.3f}{max(times) * 1e3:>12.3f}"
            for name, times in rows.items()
            if times
        ]
        head = f"{'':<14}{'count':>6}{'median ms':>12}{'longest ms':>12}"
        return "\n".join([head, *lines]) if lines else ""

    def _stop(self) -> None:
        stop, self._running = self._running, None
        if stop is not None:
            stop()


def _start(tool: str, directory: str) -> Callable[[], None]:
    """Start a trace; the returned function stops it and writes it."""
    try:  # a run without a trace must not pay for these imports
        if tool == "jax":
            from jax import profiler

            profiler.start_trace(directory)
            return profiler.stop_trace
        from torch.profiler import profile, tensorboard_trace_handler
    except ModuleNotFoundError as error:
        raise missing_extra(tool, error) from error
    trace = profile(on_trace_ready=tensorboard_trace_handler(directory))
    trace.start()
    return trace.stop
