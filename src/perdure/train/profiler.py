"""`Profiler`: a trace of a few steps, by the profiler of JAX or of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from perdure.errors import TrainError, missing_extra
from perdure.train.metrics import scalars
from perdure.train.trainer import Hook, Trainer

DIRECTORY = "profile"


class Profiler(Hook):
    """Profiles a few steps, for TensorBoard or Perfetto. It slows down these steps, and no others.

    Args:
        tool: "jax" or "torch", the profiler of which framework.
        first: First step to profile; the very first steps of a run compile.
        steps: Number of steps.
        directory: Of the trace; None is `profile` beside the summaries.

    Raises:
        TrainError: An argument cannot be used, or there is no local directory for the trace.
    """

    def __init__(
        self,
        tool: Literal["jax", "torch"],
        first: int = 10,
        steps: int = 10,
        directory: str | Path | None = None,
    ) -> None:
        if tool not in ("jax", "torch"):
            raise TrainError(f"tool: expected 'jax' or 'torch', found {tool!r}.")
        if first < 0 or steps < 1:
            raise TrainError(
                f"expected a first step of at least 0 and at least 1 step, found {first} and {steps}."
            )
        self._tool = tool
        self._first, self._last = first, first + steps
        self._directory = None if directory is None else Path(directory)
        self._stop: Callable[[], Any] | None = None

    def begin(self, trainer: Trainer) -> None:
        if self._directory is None:
            if trainer.summaries.directory is None:
                raise TrainError(
                    "Profiler: expected a local directory for the trace, found none; pass `directory`."
                )
            self._directory = trainer.summaries.directory / DIRECTORY

    def before_step(self, trainer: Trainer) -> None:
        if self._stop is None and self._first <= trainer.step < self._last:
            self._stop = _start(self._tool, str(self._directory))

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        if self._stop is not None and trainer.step >= self._last:
            scalars(logs)  # waits for the step
            self.end(trainer)

    def end(self, trainer: Trainer) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def _start(tool: str, directory: str) -> Callable[[], Any]:
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
