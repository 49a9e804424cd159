"""`Trainer`: the ready-made loop, for those who had estimators.

Owns what lives longer than one call of `train`: the state, the step, the hooks. Invariant: `step` is
the number of steps that are in `state`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.checkpoint import CheckpointManager, Processes, SingleProcess
from perdure.checkpoint.arguments import makes_state
from perdure.errors import TrainError
from perdure.store import LocalStorage
from perdure.store.urls import open_storage
from perdure.train.batch_source import (
    BatchSource,
    IteratorBatchSource,
    evaluation_batches,
    open_source,
)
from perdure.train.config import RunConfig
from perdure.train.hooks import Hook
from perdure.train.loop import Loop, open_manager, whole
from perdure.train.metrics import Means
from perdure.train.progress import Progress
from perdure.train.summaries import Summaries

StepFn = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Evaluation:
    """On what, how many batches of it (None: all), and after how many steps each."""

    data: Any
    steps: int | None
    every: int


class Trainer:
    """Trains `state` by `step_fn(state, batch) -> (state, logs)`, and goes on where a run stopped.

    `state` is any tree that a checkpoint takes, or a function that makes it (with one parameter it
    gets `config.seed`). `data` is a dataset addressed by step, a function of the step, a list of
    batches, or an iterator that can be put back. `logs` is a scalar, the loss, or a mapping of
    scalars and (sum, weight) pairs. With a `strategy`, `step_fn` is what `strategy.step` returned, and
    batches are `strategy.batch(data, step)`. `eval_fn(state, batch)` gives the metrics of a batch as
    (sum, weight) pairs; with a strategy it is run for each logical replica.

    Raises `TrainError` and `DataError` for what cannot work, at once.
    """

    def __init__(
        self,
        step_fn: StepFn,
        state: Any,
        data: Any,
        config: RunConfig,
        hooks: Iterable[Hook] = (),
        *,
        strategy: Any = None,
        eval_fn: Callable[[Any, Any], Mapping[str, Any]] | None = None,
    ) -> None:
        if not isinstance(config, RunConfig):
            raise TrainError(f"config: expected a RunConfig, found {config!r}.")
        self.config = config
        self.hooks = _checked(hooks)
        self.strategy = strategy
        self.processes: Processes = SingleProcess() if strategy is None else strategy.processes
        self.step = 0
        self.stop_reason = ""
        self.manager: CheckpointManager | None = None  # while it trains
        self._step_fn = step_fn
        self._many = getattr(step_fn, "many", None)
        self._eval_fn = eval_fn
        self._source = open_source(data, strategy)
        if isinstance(self._source, IteratorBatchSource) and (strategy or self.processes.count > 1):
            raise TrainError(
                "a strategy takes its shares by index: expected a dataset with batch(step, replica, "
                "replicas), found an iterator."
            )
        self.recipe(self._source)
        self.state = _made(state, config.seed)
        self.members = _members(self.hooks)
        local = config.summary_dir
        if local is None:
            storage = open_storage(config.model_dir)
            local = storage.where if isinstance(storage, LocalStorage) else None
        self.summaries = Summaries(local if self.processes.is_chief else None)
        self.progress = Progress("off")

    def train(self, max_steps: int | None = None, *, steps: int | None = None) -> Any:
        """Train from the newest good checkpoint in `model_dir`, and return the state.

        SIGTERM, or a cloud's notice, ends the step, saves, and leaves with status 75. After an error of
        a step or a hook the last checkpoint stands, and another call resumes from it.

        Args:
            max_steps: train until this many steps are in the state, those of earlier calls and runs
                included. If they are already, `train` logs that and returns.
            steps: in place of `max_steps`: train for so many steps more than the checkpoint has at this
                call. A program that is started again after an interruption then trains for `steps`
                more once again; give `max_steps` in one that may be.

        Raises:
            TrainError: not exactly one of the two was given, or it is less than 1.
        """
        if (max_steps is None) == (steps is None):
            raise TrainError(
                f"expected one of max_steps (in all) and steps (more than now), found "
                f"max_steps={max_steps!r} and steps={steps!r}."
            )
        self._run(max_steps, None, steps)
        return self.state

    def train_and_evaluate(
        self, data: Any, max_steps: int, *, every: int, steps: int | None = None
    ) -> dict[str, float]:
        """Train as `train` does, and evaluate on `data` each `every` steps and at the end.

        Every evaluation is saved with the state of its step, under names such as `eval/accuracy`
        (for `Retention(best_metric=...)`), and handed to the hooks. `steps` batches are looked at,
        by default all. Returns the metrics of the last one.
        """
        _require_steps("every", every)
        if steps is not None:
            _require_steps("steps", steps)
        self._require_eval_fn()
        return self._run(max_steps, Evaluation(data, steps, every))

    def evaluate(self, data: Any, steps: int | None = None) -> dict[str, float]:
        """Metrics of the newest checkpoint in `model_dir` (of the fresh state where there is none)."""
        self._require_eval_fn()
        if steps is not None:
            _require_steps("steps", steps)
        with open_manager(self, self._source) as manager:
            restored = manager.restore_or_initialize(whole(self, self._source))
        self.state, self.step = restored.state.main, restored.step
        means = Means()
        for batch in evaluation_batches(data, steps, self.strategy):
            means.add(self.evaluate_batch(batch))
        return means.result()

    def due(self, every: int) -> bool:
        """Whether a multiple of `every` lies in the execution that ends at `step`.

        A function of `step` alone, so an interruption moves nothing. An execution that `max_steps`
        cuts short counts for nothing here: a longer run does not end one there.
        """
        each, step = self.config.steps_per_execution, self.step
        if each == 1:
            return step % every == 0
        return step % each == 0 and step // every > (step - each) // every

    def request_stop(self, reason: str) -> None:
        """End training before the next step, after a save."""
        self.stop_reason = self.stop_reason or reason

    def say(self, text: str) -> None:
        """A statement for the person who watches."""
        self.progress.say(text)

    def recipe(self, source: BatchSource) -> dict[str, Any]:
        """What decides the result, for the checkpoints. Raises `TrainError` for two seeds."""
        seed, found = self.config.seed, source.recipe
        if seed is None:
            return found
        if self.strategy is not None:
            if found.get("seed") != seed:
                raise TrainError(
                    f"expected one seed, found {seed} in RunConfig and {found.get('seed')} in the "
                    f"strategy; leave the one of RunConfig out."
                )
            return found
        return {"seed": seed, **{f"data_{n}" if n == "seed" else n: v for n, v in found.items()}}

    def execute(self, batches: list[Any]) -> Any:
        """Run one step for each batch; gives the logs of the last one."""
        if len(batches) > 1 and self._many is not None:
            self.state, logs = self._many(self.state, batches)
            return _last(logs)
        logs = None
        for batch in batches:
            result = self._step_fn(self.state, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TrainError(
                    f"step {self.step + 1}: step_fn must return (state, logs), found "
                    f"{type(result).__name__}."
                )
            self.state, logs = result
        return logs

    def evaluate_batch(self, batch: Any) -> Mapping[str, Any]:
        """The metrics of one batch, over all logical replicas."""
        assert self._eval_fn is not None
        if self.strategy is None:
            return self._eval_fn(self.state, batch)
        return self.strategy.reduce("sum", self.strategy.run(self._eval_fn, (self.state, batch)))

    def _run(
        self, max_steps: int | None, evaluation: Evaluation | None, steps: int | None = None
    ) -> dict[str, float]:
        if steps is None:
            _require_steps("max_steps", max_steps)
        else:
            _require_steps("steps", steps)
        config = self.config
        self.stop_reason = ""
        mode = config.progress if self.processes.is_chief else "off"
        self.progress = Progress(mode, config.console, config.log_step_count_steps)
        return Loop(self, self._source, max_steps, evaluation, steps or 0).run()

    def _require_eval_fn(self) -> None:
        if self._eval_fn is None:
            raise TrainError(
                "an evaluation needs a function for the metrics of a batch: "
                "Trainer(..., eval_fn=eval_fn), eval_fn(state, batch) -> {'accuracy': (sum, weight)}."
            )


def _require_steps(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TrainError(f"{name}: expected an integer of at least 1, found {value!r}.")


def _checked(hooks: Any) -> tuple[Hook, ...]:
    if isinstance(hooks, Hook) or not isinstance(hooks, Iterable):
        raise TrainError(f"hooks: expected a list of hooks, found {hooks!r}.")
    found = tuple(hooks)
    for hook in found:
        if not isinstance(hook, Hook):
            raise TrainError(f"hooks: expected objects of perdure.train.Hook, found {hook!r}.")
    return found


def _last(logs: Any) -> Any:
    """Of logs that are stacked along a new first axis, those of the last step."""
    if isinstance(logs, Mapping):
        return {name: _last(value) for name, value in logs.items()}
    if isinstance(logs, (tuple, list)):
        return tuple(map(_last, logs))
    return logs[-1] if getattr(logs, "ndim", 0) else logs


def _made(state: Any, seed: int | None) -> Any:
    """The fresh state. Modules are callable too, so only functions are called."""
    if not makes_state(state):
        return state
    takes_one = any(
        each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        for each in inspect.signature(state).parameters.values()
    )
    if takes_one and seed is None:
        raise TrainError("state: the function takes a seed; name one: RunConfig(seed=0).")
    return state(seed) if takes_one else state()


def _members(hooks: Iterable[Hook]) -> dict[str, Any]:
    """Hooks with a state by the name that they have in a checkpoint: early_stopping, ..."""
    members: dict[str, Any] = {}
    for hook in hooks:
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            plain = getattr(hook, "name", type(hook).__name__.lstrip("_"))
            stem = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", plain).lower()
            name, number = stem, 2
            while name in members:
                name, number = f"{stem}_{number}", number + 1
            members[name] = hook
    return members
