"""What a training run changes: the part of a `Trainer` that the loop and the hooks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perdure.checkpoint import CheckpointManager
from perdure.train.config import RunConfig
from perdure.train.progress import Progress
from perdure.train.summaries import Summaries


@dataclass(eq=False, repr=False)
class TrainingState:
    """The state of the training, and what hooks may use.

    Attributes:
        config: The configuration of the run.
        state: The state after `step` steps. A hook may replace it.
        summaries: Scalars and texts of the run, by step.
        progress: The bar or the lines that show the run.
        step: Number of steps that are in `state`.
        stop_reason: Why training ends before the next step; empty if it does not.
        manager: The manager of the run directory while the run trains, else None.
    """

    config: RunConfig
    state: Any
    summaries: Summaries
    progress: Progress = field(default_factory=lambda: Progress("off"))
    step: int = 0
    stop_reason: str = ""
    manager: CheckpointManager | None = None

    def due(self, every: int) -> bool:
        """Whether the execution that ended at `step` contains a multiple of `every`.

        Depends on `step` alone, so an interruption changes nothing. An execution that `max_steps` cut
        short does not count: a longer run has no execution that ends there.
        """
        size, step = self.config.steps_per_execution, self.step
        if size == 1:
            return step % every == 0
        return step % size == 0 and step // every > (step - size) // every

    def request_stop(self, reason: str) -> None:
        """End training before the next step, after a save."""
        self.stop_reason = self.stop_reason or reason

    def say(self, text: str) -> None:
        """Print one line about the run."""
        self.progress.say(text)
