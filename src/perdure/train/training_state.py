"""What a training run changes: the part of a `Trainer` that the loop and the hooks share."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from perdure.checkpoint import CheckpointManager
from perdure.errors import StateError
from perdure.train.config import RunConfig
from perdure.train.progress import Progress
from perdure.train.summaries import Summaries


class TrainingState:
    """The state of the training, and what hooks may use.

    Attributes:
        config: The configuration of the run.
        summaries: Scalars and texts of the run, by step.
        progress: The bar or the lines that show the run.
        step: Number of steps that are in `state`.
        stop_reason: Why training ends before the next step; empty if it does not.
        manager: The manager of the run directory while the run trains, else None.
        warm_start_from: The checkpoint that a new run begins with, None for the fresh state.
    """

    def __init__(self, config: RunConfig, state: Any, summaries: Summaries) -> None:
        self.config = config
        self.state = state
        self.summaries = summaries
        self.progress = Progress("off")
        self.step = 0
        self.stop_reason = ""
        self.manager: CheckpointManager | None = None
        self.warm_start_from: Any = None

    @property
    def state(self) -> Any:
        """The state after `step` steps. A hook may replace it.

        Raises:
            StateError: A step has failed that had used its memory.
        """
        if self._is_lost:
            raise StateError(
                "the state is lost: it was given to the step that failed, which used its memory. "
                "`train` resumes from the last checkpoint. To keep it, do not give it away: "
                "strategy.step(..., donate=False), or jax.jit without `donate_argnums`."
            )
        return self._target

    @state.setter
    def state(self, state: Any) -> None:
        # What a restore gives back: of a lost state the deleted arrays.
        self._target, self._is_lost = state, False

    def _step_failed(self) -> None:
        """Find out whether the step that has raised an error had used the memory of `state`."""
        if (jax := sys.modules.get("jax")) is not None:
            with suppress(TypeError, ValueError):  # no tree of JAX
                self._is_lost = any(
                    isinstance(leaf, jax.Array) and leaf.is_deleted()
                    for leaf in jax.tree.leaves(self._target)
                )

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
