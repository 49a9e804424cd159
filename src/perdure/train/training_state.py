"""What the loop and the trainer share: the state of the training, what it computes, and its hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from perdure.checkpoint import CheckpointManager, Processes, SingleProcess
from perdure.checkpoint.journal import Journal, trace_recorded
from perdure.errors import StateError, TrainError
from perdure.train.config import RunConfig
from perdure.train.summaries import Progress, Summaries

StepFn = Callable[[Any, Any], tuple[Any, Any]]
EvalFn = Callable[[Any, Any], Mapping[str, Any]]


class TrainingState:
    """The state of the training, and what hooks may use.

    Attributes:
        config: The configuration of the run.
        summaries: Scalars of the run, by step.
        progress: The lines that show the run.
        step: Number of steps that are in `state`.
        stop_reason: Why training ends before the next step; empty if it does not.
        manager: The manager of the run directory while the run trains, else None.
        warm_start_from: The checkpoint that a new run begins with, None for the fresh state.
    """

    def __init__(self, config: RunConfig, state: Any, summaries: Summaries) -> None:
        self.config = config
        self.state = state
        self.summaries = summaries
        self.progress = Progress(False)
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
                "the state is lost: the step that failed used its memory. `train` resumes from the "
                "last checkpoint. To keep it: strategy.step(..., donate=False), or no `donate_argnums`."
            )
        return self._target

    @state.setter
    def state(self, state: Any) -> None:
        # What a restore gives back: of a lost state the deleted arrays.
        self._target, self._is_lost = state, False

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


class Computation:
    def __init__(self, step_fn: StepFn, eval_fn: EvalFn | None, strategy: Any) -> None:
        self.strategy = strategy
        self.processes: Processes = SingleProcess() if strategy is None else strategy.processes
        self._step_fn = step_fn
        self._many = getattr(step_fn, "many", None)
        self._eval_fn = eval_fn
        self._journal: Journal | None = None
        self._notes_itself = False

    def train(self, training: TrainingState, batches: list[Any]) -> Any:
        """Make one step for each batch; returns the logs of the last one.

        `training.state` is replaced after every step, so that no older state is kept alive.
        """
        try:
            return self._train(training, batches)
        except BaseException:
            # The step may have used the memory of the state.
            if (jax := sys.modules.get("jax")) is not None:
                with suppress(TypeError, ValueError):  # no tree of JAX
                    training._is_lost = any(
                        isinstance(leaf, jax.Array) and leaf.is_deleted()
                        for leaf in jax.tree.leaves(training._target)
                    )
            raise

    def _train(self, training: TrainingState, batches: list[Any]) -> Any:
        if len(batches) > 1 and self._many is not None:
            training.state, logs = self._many(training.state, batches)
            return _last(logs)
        logs = None
        for number, batch in enumerate(batches, training.step + 1):
            if not self._notes_itself:
                trace_recorded(number, "batch", batch)
                if self._journal is not None and self._journal.wants(number):
                    self._journal.note([batch], SingleProcess())
            result = self._step_fn(training.state, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TrainError(
                    f"step {number}: step_fn must return (state, logs), found "
                    f"{type(result).__name__}."
                )
            training.state, logs = result
        return logs

    def donate(self, on: bool) -> None:
        """Let a step of a strategy use the memory of the state before it; `train` does not keep it."""
        if (donate_results := getattr(self._step_fn, "donate_results", None)) is not None:
            donate_results(on)

    def note_into(self, journal: Journal | None) -> None:
        """Let the journal have a digest of each batch that it records; None ends that."""
        self._journal = journal
        self._notes_itself = hasattr(self._step_fn, "journal")  # a step of a strategy
        if self._notes_itself:
            self._step_fn.journal = journal  # type: ignore[attr-defined]

    def audit(self, rate: float) -> None:
        if not hasattr(self._step_fn, "set_audit"):
            raise TrainError(
                "audit: expected a step_fn made by strategy.step(grad, update), of which a part can be "
                f"computed again, found {type(self._step_fn).__name__}."
            )
        step: Any = self._step_fn
        step.set_audit(replace(step.audit_options, rate=float(rate)))

    def require_eval_fn(self) -> None:
        if self._eval_fn is None:
            raise TrainError(
                "an evaluation needs a function for the metrics of a batch: "
                "Trainer(..., eval_fn=eval_fn), eval_fn(state, batch) -> {'accuracy': (sum, weight)}."
            )

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        assert self._eval_fn is not None
        if self.strategy is None:
            return self._eval_fn(state, batch)
        return self.strategy.reduce("sum", self.strategy.run(self._eval_fn, (state, batch)))


def _last(logs: Any) -> Any:
    if isinstance(logs, Mapping):
        return {name: _last(value) for name, value in logs.items()}
    if isinstance(logs, (tuple, list)):
        return tuple(map(_last, logs))
    return logs[-1] if getattr(logs, "ndim", 0) else logs
