"""`RunCheckpoints`: what the checkpoints of a training run hold, and when one is saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perdure.checkpoint import CheckpointManager, ManagerOptions, Processes
from perdure.checkpoint.address import find_step
from perdure.checkpoint.journal import Journal
from perdure.errors import TrainError
from perdure.state import StateWithExtras
from perdure.train.config import RunConfig
from perdure.train.interval import SaveMeter, Timer
from perdure.train.metrics import scalars
from perdure.train.training_state import HookCalls, TrainingState


class RunCheckpoints:
    """Restores and saves the state of a training run, and what belongs to it, through one manager.

    Args:
        training: The run. Its `manager` is set here.
        manager: The manager of the run directory.
        extras: What a checkpoint holds besides the state: hooks and iterators that have a state.
        hooks: Called before and after each save.
    """

    def __init__(
        self,
        training: TrainingState,
        manager: CheckpointManager,
        extras: Mapping[str, Any],
        hooks: HookCalls,
    ) -> None:
        self.manager = training.manager = manager
        self.restored_step = 0
        self.saved_step: int | None = None
        self._training = training
        self._extras = extras
        self._hooks = hooks
        every = training.config.save_interval_secs
        self._timer = None if every is None else Timer(every, training.config.clock())
        manager.preemption.config = training.config.checkpoint.termination

    @property
    def meter(self) -> SaveMeter | None:
        """Measures what saves cost, if the interval depends on it."""
        return None if self._timer is None else self._timer.meter

    def tree(self) -> StateWithExtras:
        """What a checkpoint holds now."""
        return StateWithExtras(self._training.state, self._extras)

    def restore(self) -> bool:
        """Become the writer and restore the newest good checkpoint; True if there was none."""
        training, manager = self._training, self.manager
        manager.claim()
        target = StateWithExtras(training._target, self._extras)
        restored = manager.restore_or_initialize(target)
        training.state, training.step = restored.state.main, restored.step
        self.restored_step = self.saved_step = restored.step
        # A state that came from the mirror is not fresh, even if the run directory is empty.
        is_new = restored.step == 0 and manager.latest_step() is None
        if is_new and training.warm_start_from is not None:
            run, step = find_step(training.warm_start_from)
            options = ManagerOptions(save_random_state=False)
            with CheckpointManager(run.storage, options=options, recipe={}) as other:
                training.state = other.restore(step, training._target, strict=False).state
        return is_new

    @property
    def journal(self) -> Journal | None:
        """The journal of the run, if the configuration asks for one."""
        journal = self.manager.journal
        return journal if journal.records_saves else None

    def record(self, logs: Any) -> None:
        """Record the step that has just run, if it is one of those that the journal has."""
        journal, step = self.journal, self._training.step
        if journal is not None and journal.wants(step):
            journal.record(step, self.tree(), metrics=scalars(logs))
        elif journal is not None:
            journal.skip(step)

    def due_by_clock(self, now: float) -> bool:
        """Whether the interval in seconds has passed. A save that is measured ends before the next."""
        if self._timer is None or not self._timer.due(now):
            return False
        return self.meter is None or not self.manager.is_saving_in_progress()

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the state as `step`, unless the policy for NaN forbids it."""
        clock = self._training.config.clock
        began = clock()
        if self.allows(step, metrics):
            self._hooks.call("before_save")
            if self.manager.save(step, self.tree(), metrics, force=True):
                self.saved_step = step
                if self._hooks.overrides("after_save") and self.manager.wait_until_finished():
                    self._hooks.call("after_save")
        if self._timer is not None:
            now = clock()
            self._timer.saved(now)
            if self._timer.meter is not None:
                self._timer.meter.saved(now - began)

    def allows(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the policy for NaN lets this step be saved. It may warn, or raise `TrainError`."""
        policy = self._training.config.checkpoint.nan_metrics
        names = ", ".join(repr(name) for name, value in metrics.items() if value != value)
        if not names:
            return True
        problem = f"{self.manager.directory}: step {step}: the metric {names} is NaN"
        if policy == "raise":
            raise TrainError(
                f"{problem}, and nan_metrics is 'raise'. Step {step} was not saved; the last "
                f"checkpoint is step {self.saved_step}. Resume from it with another learning rate or "
                f"other data."
            )
        saved = policy == "save"
        warnings.warn(
            f"{problem}; the step was {'saved all the same' if saved else 'not saved'} "
            f"(nan_metrics={policy!r}).",
            stacklevel=2,
        )
        return saved


def open_manager(
    config: RunConfig, recipe: Mapping[str, Any], processes: Processes | None
) -> CheckpointManager:
    """The manager that a configuration asks for; without `processes` it looks for a group itself."""
    options = config.checkpoint
    if config.journal_every is not None:
        options = replace(options, journal_every=config.journal_every)
    return CheckpointManager(
        config.model_dir,
        mirror=options.mirror,
        max_to_keep=config.keep_checkpoint_max or None,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,  # type: ignore[call-arg]
        options=options,
        recipe=recipe,
        allow=options.allow,
        processes=processes,
    )
