"""`Trainer`, the ready-made training loop, and `Hook`, which it calls: the two sides of one interface.

The trainer keeps what lives longer than one call of `train`: the state, the step, the hooks. Invariant:
`step` is the number of steps that are in `state`.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perdure.checkpoint import CheckpointManager, Restored, Retention, latest_checkpoint
from perdure.checkpoint.address import open_checkpoint
from perdure.checkpoint.arguments import integer
from perdure.checkpoint.checkpoint import makes_state
from perdure.data.pipelines import gives_batch_of_step
from perdure.data.sources import unstack, weight_of
from perdure.errors import StepNotFoundError, TrainError
from perdure.state import StateWithExtras
from perdure.store import LocalStorage
from perdure.store.urls import open_storage
from perdure.tensorflow_names import TensorFlowNames, names_forms
from perdure.train import batch_source
from perdure.train.config import RunConfig
from perdure.train.loop import Loop
from perdure.train.summaries import Means, Progress, Summaries
from perdure.train.training_state import Computation, EvalFn, StepFn, TrainingState

PredictFn = Callable[[Any, Any], Any]


class Hook:
    """Base class of hooks. Override any of the methods; the others do nothing.

    The trainer has `step` (finished steps), `state`, which a hook may replace, `due`, `request_stop`,
    `summaries` and `manager`. With `steps_per_execution`, `before_step` and `after_step` are called
    around several steps. In a group every process calls every hook, with the same decisions.
    """

    def begin(self, trainer: Trainer) -> None:
        """Training begins or resumes at `trainer.step`; the state has been restored."""

    def before_step(self, trainer: Trainer) -> None:
        """The next step is about to run. Called only if it does run."""

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        """A step has run; `logs` is what it returned. Reading a value of it waits for the step."""

    def before_save(self, trainer: Trainer) -> None:
        """The state is about to be saved. Do not change it: interrupted runs save at other steps."""

    def after_save(self, trainer: Trainer) -> None:
        """The checkpoint of `trainer.step` is durable: training waits for it if a hook has this method.

        Not called for a save that fails, nor for the save before a preempted run exits.
        """

    def after_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """An evaluation has been done and saved. Called again if a run resumes at this very step."""

    def end(self, trainer: Trainer) -> None:
        """Training ends, for whatever reason."""


class Trainer(TrainingState, TensorFlowNames):
    """Trains `state` by `step_fn(state, batch) -> (state, logs)`, and resumes an interrupted run.

    Args:
        step_fn: One training step; with a strategy, what `strategy.step` returned. `logs` is a scalar
            (the loss), or a mapping of scalars and (sum, weight) pairs.
        state: A tree of values that a checkpoint takes, or a function that makes it. If the function
            has a parameter, it is called with `config.seed`.
        data: A dataset addressed by step (with a strategy: `strategy.batch(data, step)`), a function of
            the step, a list of batches, or an iterator whose position can be saved and restored.
        config: Where the run lives, and when it saves.
        hooks: Called around steps, saves and evaluations.
        strategy: How the steps are distributed.
        eval_fn: `eval_fn(state, batch)` returns the metrics of a batch as (sum, weight) pairs. With a
            strategy it runs for each logical replica.
        warm_start_from: A run directory or `RUN@STEP`. A new run begins with the values of its leaves,
            where path, shape and dtype are those of `state`; a warning lists the others.

    Raises:
        ArgumentError, TrainError: An argument cannot be used.
        DataError: The position in the data could not be restored.
    """

    @names_forms("Trainer")
    def __init__(
        self,
        step_fn: StepFn,
        state: Any,
        data: Any,
        config: RunConfig,
        hooks: Iterable[Hook] = (),
        *,
        strategy: Any = None,
        eval_fn: EvalFn | None = None,
        warm_start_from: Any = None,
    ) -> None:
        if not isinstance(config, RunConfig):
            raise TrainError(f"config: expected a RunConfig, found {config!r}.")
        self.hooks = _checked(hooks)
        self.strategy = strategy
        self._computation = Computation(step_fn, eval_fn, strategy)
        if config.audit is not None:
            self._computation.audit(config.audit)
        self.processes = self._computation.processes
        self._source = batch_source.open_source(data, strategy)
        if isinstance(self._source, batch_source.IteratorBatchSource) and (
            strategy or self.processes.count > 1
        ):
            raise TrainError(
                "a strategy takes its shares by index: expected a dataset with batch(step, replica, "
                "replicas), found an iterator."
            )
        self._recipe = _recipe(config.seed, self._source, strategy)
        self._extras = _extras(self.hooks, self._source)
        directory: Any = None
        if self.processes.is_chief and (directory := config.output.summary_dir) is None:
            storage = open_storage(config.model_dir)
            directory = storage.where if isinstance(storage, LocalStorage) else None
        summaries = Summaries(directory, tensorboard=config.output.tensorboard)
        super().__init__(config, _initial_state(state, config.seed), summaries)
        self.warm_start_from = warm_start_from

    @names_forms("Trainer")
    def train(
        self,
        max_steps: int | None = None,
        *,
        steps: int | None = None,
        hooks: Iterable[Hook] = (),
        saving_listeners: Iterable[Hook] = (),
    ) -> Any:
        """Train from the newest good checkpoint in `model_dir`, and return the state.

        Without `max_steps` and `steps` training ends with the data, or when a hook stops it.

        On SIGTERM or a cloud's notice, the step is finished and saved, and the process exits with
        status 75. After an error, another call resumes from the last checkpoint. On JAX a step that
        fails may have used the memory of `state`: reading it raises `StateError` then.

        Args:
            max_steps: Train until the state contains this many steps, those of earlier calls and runs
                included. If it does already, `train` logs that and returns.
            steps: Instead of `max_steps`: so many steps more than the checkpoint has when this call
                begins; a program that is restarted trains for `steps` more again.
            hooks: Further hooks of this call, which have no state in the checkpoint.
            saving_listeners: Hooks with `before_save` and `after_save`; the same as `hooks`.

        Raises:
            ArgumentError: A number is less than 1.
            TrainError: Both numbers were given; or none, with data that have no end.
            SystemExit: The run was preempted; its last step is durable.
        """
        if callable(max_steps) or hasattr(max_steps, "__iter__") or hasattr(max_steps, "batch"):
            raise TrainError(
                f"max_steps: expected a number of steps, found a {type(max_steps).__name__}. The data "
                f"are given to `Trainer(step_fn, state, data, config)`, and then `train(max_steps=n)`."
            )
        if max_steps is not None and steps is not None:
            raise TrainError(
                f"expected one of max_steps (in all) and steps (more than now), found "
                f"max_steps={max_steps!r} and steps={steps!r}."
            )
        integer("max_steps", max_steps, optional=True)
        integer("steps", steps, optional=True)
        further = (*_checked(hooks), *_checked(saving_listeners))
        for hook in further:
            if hasattr(hook, "state_dict"):
                raise TrainError(
                    f"hooks: expected hooks without a state, found {type(hook).__name__}, whose state "
                    f"belongs into every checkpoint: pass it to Trainer(hooks=...)."
                )
        if max_steps is None and steps is None and not (self._source.ends or self.hooks or further):
            raise TrainError(
                "expected max_steps or steps, found neither, and data that begin again at their end. "
                "Name one, or give a hook that calls `request_stop`."
            )
        self._run(further, max_steps, steps)
        return self.state

    def train_and_evaluate(
        self, data: Any, max_steps: int, *, every: int, steps: int | None = None
    ) -> dict[str, float]:
        """Train as `train` does, and evaluate on `data` after each `every` steps and at the end.

        Every evaluation is saved with the state of its step, as `eval/accuracy` and so on. The hooks
        get those after each `every` steps; another one at the end is only returned.

        Args:
            data: What to evaluate on.
            max_steps: As for `train`.
            every: Steps between evaluations.
            steps: Number of batches of an evaluation; None takes all.

        Returns:
            The metrics of the last evaluation.

        Raises:
            ArgumentError: A number is less than 1.
            TrainError: The trainer has no `eval_fn`.
        """
        integer("max_steps", max_steps)
        integer("every", every)
        integer("steps", steps, optional=True)
        self._computation.require_eval_fn()
        return self._run((), max_steps, None, data, every, steps)

    @names_forms("Trainer")
    def evaluate(self, data: Any, steps: int | None = None) -> dict[str, float]:
        """Metrics of the newest checkpoint in `model_dir`, or of the fresh state if there is none.

        Args:
            data: What to evaluate on.
            steps: Number of batches; None takes all.
        """
        self._computation.require_eval_fn()
        self._restore_newest(steps)
        means = Means()
        for batch in batch_source.evaluation_batches(data, steps, self.strategy):
            means.add(self._computation.evaluate(self.state, batch))
        return means.result()

    @names_forms("Trainer")
    def predict(self, data: Any, predict_fn: PredictFn, steps: int | None = None) -> Iterator[Any]:
        """Predictions of the newest checkpoint in `model_dir`, one for each example, in order.

        Args:
            data: What to predict for. Rows that pad a batch are left out.
            predict_fn: `predict_fn(state, batch)` returns a tree of arrays with a row for each example.
                It is called in this process alone, without the strategy.
            steps: Number of batches; None takes all.
        """
        self._restore_newest(steps)
        weighted = gives_batch_of_step(data)
        for batch in batch_source.evaluation_batches(data, steps):
            rows = unstack(predict_fn(self.state, batch))
            weights = weight_of(batch) if weighted else itertools.repeat(1)
            yield from (row for row, weight in zip(rows, weights, strict=False) if weight)

    @property
    def model_dir(self) -> Any:
        """The run directory."""
        return self.config.model_dir

    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint in `model_dir` as `RUN@STEP`, None before the first."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Paths of the leaves of the newest checkpoint in `model_dir`."""
        return sorted(leaf.path for leaf in open_checkpoint(self.model_dir).manifest.leaves)

    def _restore_newest(self, steps: int | None) -> None:
        integer("steps", steps, optional=True)
        with self._open_manager() as manager:
            fresh = StateWithExtras(self._target, self._extras)
            try:  # `restore` takes no lock: another process may be training
                restored = manager.restore(like=fresh)
            except StepNotFoundError:
                restored = Restored(fresh, 0)
        self.state, self.step = restored.state.main, restored.step

    def _run(self, hooks: Sequence[Hook], *goal: Any) -> dict[str, float]:
        config, output = self.config, self.config.output
        self.stop_reason = ""
        shown = output.progress == "lines" and self.processes.is_chief
        self.progress = Progress(shown, output.console, config.log_step_count_steps)
        calls = (*self.hooks, *hooks)
        waits = any(type(hook).after_save is not Hook.after_save for hook in calls)
        manager, source = self._open_manager(), self._source
        loop = Loop(self, self._computation, source, manager, self._extras, calls, waits, *goal)
        return loop.run()

    def _open_manager(self) -> CheckpointManager:
        config, options = self.config, self.config.checkpoint
        if config.journal_every is not None:
            options = replace(options, journal_every=config.journal_every)
        if (hours := config.keep_checkpoint_every_n_hours) is not None:
            rules = replace(options.retention or Retention(), keep_every_n_hours=hours)
            options = replace(options, retention=rules)
        return CheckpointManager(
            config.model_dir,
            mirror=options.mirror,
            max_to_keep=config.keep_checkpoint_max or None,
            options=options,
            recipe=self._recipe,
            allow=options.allow,
            processes=None if self.strategy is None else self.processes,
        )


def _checked(hooks: Any) -> tuple[Hook, ...]:
    checked = tuple(hooks) if isinstance(hooks, Iterable) else (None,)
    if not all(isinstance(hook, Hook) for hook in checked):
        raise TrainError(f"hooks: expected a list of perdure.train.Hook, found {hooks!r}.")
    return checked  # type: ignore[return-value]


def _initial_state(state: Any, seed: int | None) -> Any:
    """The fresh state. Modules are callable too, so only functions are called."""
    if not makes_state(state):
        return state
    takes_one = any(
        parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        for parameter in inspect.signature(state).parameters.values()
    )
    if takes_one and seed is None:
        raise TrainError("state: the function takes a seed; name one: RunConfig(seed=0).")
    return state(seed) if takes_one else state()


def _recipe(seed: int | None, source: batch_source.BatchSource, strategy: Any) -> Mapping[str, Any]:
    recipe = source.recipe
    if seed is None or (strategy is not None and recipe.get("seed") == seed):
        return recipe
    if strategy is not None:
        raise TrainError(
            f"expected one seed, found {seed} in RunConfig and {recipe.get('seed')} in the strategy; "
            f"leave the one of RunConfig out."
        )
    return {"seed": seed, **{f"data_{n}" if n == "seed" else n: v for n, v in recipe.items()}}


def _extras(hooks: Iterable[Hook], source: batch_source.BatchSource) -> dict[str, Any]:
    """What a checkpoint holds besides the state: hooks by name (`early_stopping`), and the data."""
    members: dict[str, Any] = {}
    for hook in hooks:
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            class_name = getattr(hook, "name", type(hook).__name__.lstrip("_"))
            stem = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
            name, number = stem, 2
            while name in members:
                name, number = f"{stem}_{number}", number + 1
            members[name] = hook
    extras: dict[str, Any] = {"hooks": members} if members else {}
    return extras | (
        {"data": source} if isinstance(source, batch_source.IteratorBatchSource) else {}
    )
