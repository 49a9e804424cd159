"""What a `Trainer` computes: the user's functions for steps and evaluations, and their strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from perdure.checkpoint import Processes, SingleProcess
from perdure.checkpoint.journal import Journal
from perdure.checkpoint.step_trace import trace_recorded
from perdure.errors import TrainError
from perdure.train.training_state import TrainingState

StepFn = Callable[[Any, Any], tuple[Any, Any]]
EvalFn = Callable[[Any, Any], Mapping[str, Any]]


class Computation:
    """A step function and an evaluation function, under a strategy or without one."""

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

        `training.state` is replaced after every step, so that no older state is kept alive. An error
        leaves the state of the last step that was done, unless the step that failed has changed it in
        place, or has used its memory (`donate`): then `training.state` is lost.
        """
        try:
            return self._train(training, batches)
        except BaseException:
            training._step_failed()
            raise

    def _train(self, training: TrainingState, batches: list[Any]) -> Any:
        if len(batches) > 1 and self._many is not None:
            training.state, logs = self._many(training.state, batches)
            return _last(logs)
        logs = None
        for number, batch in enumerate(batches, training.step + 1):
            self._note(batch, number)
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
        donate_results = getattr(self._step_fn, "donate_results", None)
        if donate_results is not None:
            donate_results(on)

    def note_into(self, journal: Journal | None) -> None:
        """Let the journal have a digest of each batch that it records; None ends that."""
        self._journal = journal
        self._notes_itself = hasattr(self._step_fn, "journal")  # a step of a strategy
        if self._notes_itself:
            self._step_fn.journal = journal  # type: ignore[attr-defined]

    def audit(self, rate: float) -> None:
        """Audit this share of the steps.

        Raises:
            TrainError: The step function is not one of a strategy.
        """
        if not hasattr(self._step_fn, "set_audit"):
            raise TrainError(
                "audit: expected a step_fn made by strategy.step(grad, update), of which a part can be "
                f"computed again, found {type(self._step_fn).__name__}."
            )
        step: Any = self._step_fn
        step.set_audit(replace(step.audit_options, rate=float(rate)))

    def _note(self, batch: Any, step: int) -> None:
        if not self._notes_itself:
            trace_recorded(step, "batch", batch)
        if self._journal is not None and not self._notes_itself and self._journal.wants(step):
            self._journal.note([batch], SingleProcess())

    def require_eval_fn(self) -> None:
        """Raise `TrainError` if there is no function to evaluate with."""
        if self._eval_fn is None:
            raise TrainError(
                "an evaluation needs a function for the metrics of a batch: "
                "Trainer(..., eval_fn=eval_fn), eval_fn(state, batch) -> {'accuracy': (sum, weight)}."
            )

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        """The metrics of one batch, over all logical replicas."""
        assert self._eval_fn is not None
        if self.strategy is None:
            return self._eval_fn(state, batch)
        return self.strategy.reduce("sum", self.strategy.run(self._eval_fn, (state, batch)))


def _last(logs: Any) -> Any:
    """The logs of the last step, of logs that are stacked along a new first axis."""
    if isinstance(logs, Mapping):
        return {name: _last(value) for name, value in logs.items()}
    if isinstance(logs, (tuple, list)):
        return tuple(map(_last, logs))
    return logs[-1] if getattr(logs, "ndim", 0) else logs
