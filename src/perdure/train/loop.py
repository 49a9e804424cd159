"""`Loop`: one call of `Trainer.train`, from the restore to the last save.

Owns the order in which things happen behind an execution (one step, or `steps_per_execution`):

    after_step hooks, evaluation, summaries, save, after_evaluate hooks, fetch of the next, preempted?

Invariant: what the checkpoint of a step holds is a function of the step. So an evaluation is always
saved with, and changes the state (through hooks) only behind that save. After a resume at such a step
the hooks are called again, with the metrics that the checkpoint holds, or after another evaluation
where the first one was interrupted.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from perdure.checkpoint import CheckpointManager, Processes
from perdure.checkpoint.preemption import Interrupted
from perdure.errors import TrainError
from perdure.heartbeats import beat
from perdure.state import StateWithExtras
from perdure.train.batch_source import BatchSource, IteratorBatchSource, evaluation_batches
from perdure.train.hooks import Hook
from perdure.train.interval import Timer
from perdure.train.metrics import Means, is_finite, scalars

if TYPE_CHECKING:
    from perdure.train.trainer import Evaluation, Trainer

EVALUATION = "eval/"
"""In front of the names of an evaluation's metrics, in summaries and in checkpoints."""

_GO, _PREEMPTED, _DUE, _STOP = 0, 1, 2, 4


class Loop:
    """Runs a trainer up to `max_steps`, or for `steps` more than are in the checkpoint; without an
    `evaluation` it only trains."""

    def __init__(
        self,
        trainer: Trainer,
        source: BatchSource,
        max_steps: int | None,
        evaluation: Evaluation | None,
        steps: int = 0,
    ) -> None:
        config = trainer.config
        self._trainer = trainer
        self._source = source
        self._max_steps = 0 if max_steps is None else max_steps
        self._more_steps = steps
        self._evaluation = evaluation
        self._manager = trainer.manager = open_manager(trainer, source)
        self._flag = self._manager.preemption
        self._flag.configure(config.termination)
        self._group = _StepGroup(trainer.processes) if trainer.processes.count > 1 else None
        self._clock = config.clock
        every = config.save_every
        self._timer = None if every is None else Timer(every, self._clock())
        self._before = _overriding(trainer.hooks, "before_step")
        self._after = _overriding(trainer.hooks, "after_step")
        self._start = 0
        self._saved: int | None = None
        self._evaluated: int | None = None
        self._reacted: int | None = None
        self._due_by_clock = self._ended = False
        self._logs: Any = None
        self._found: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Train; gives the metrics of the last evaluation. Raises `SystemExit` when preempted."""
        trainer = self._trainer
        begun: list[Hook] = []
        try:
            self._flag.install()
            self._resume()
            trainer.progress.begin(self._start, self._max_steps, self._clock())
            for hook in trainer.hooks:
                begun.append(hook)
                hook.begin(trainer)
            self._react_again()
            if self._start >= self._max_steps:
                trainer.say(f"max_steps {self._max_steps} is reached already: nothing to train.")
            while trainer.step < self._max_steps and not self._ended:
                self._execute()
            self._finish()
            self._manager.wait_until_finished()
            vote = _PREEMPTED if self._flag.raised else _GO
            if self._group is not None:
                vote, _ = self._group.agree(vote)
            if vote & _PREEMPTED:
                self._leave()  # what comes behind the training would not get to its end
            return self._found
        finally:
            self._close(begun)

    # ---------------------------------------------------------------- begin

    def _resume(self) -> None:
        trainer, manager = self._trainer, self._manager
        self._manager.claim()
        restored = manager.restore_or_initialize(whole(trainer, self._source))
        # A state that came from the mirror is not fresh, whatever the run directory holds.
        fresh = restored.step == 0 and manager.latest_step() is None
        if self._group is not None:
            self._group.processes.barrier()  # or the chief's first save might be seen as an old one
        trainer.state = restored.state.main
        trainer.step = self._start = restored.step
        if self._more_steps:
            self._max_steps = restored.step + self._more_steps
        trainer.summaries.open(restored.step)
        if fresh:
            # A disk that takes no checkpoint is told before the work and not after it, and another
            # call finds the fresh state even if steps have changed it in place.
            self._manager.save(0, whole(trainer, self._source), force=True)
            trainer.say(f"{manager.directory}: a new run")
        else:
            trainer.say(f"{manager.directory}: goes on behind step {restored.step}")
        if trainer.processes.is_chief and trainer.summaries.directory is None:
            trainer.say("no summaries: the run directory is not local; name a summary_dir")
        self._saved = restored.step

    def _react_again(self) -> None:
        """What an evaluation changed behind its save is changed again, by the same metrics."""
        trainer, evaluation = self._trainer, self._evaluation
        if evaluation is None or not self._start:
            return
        if not trainer.due(evaluation.every) and self._start < self._max_steps:
            return
        held = self._manager.metrics(self._start)
        numbers = {name: math.nan if value is None else value for name, value in held.items()}
        found = {
            name.removeprefix(EVALUATION): value
            for name, value in numbers.items()
            if name.startswith(EVALUATION)
        }
        if not found:
            found = self._evaluate()
            self._write_down(numbers, found)
            # It was preempted in that evaluation, and saved without its numbers.
            self._save(self._start, {**numbers, **_prefixed(found)})
        self._found, self._evaluated = found, self._start
        self._react()

    # ---------------------------------------------------------------- steps

    def _execute(self) -> None:
        trainer = self._trainer
        start = trainer.step
        each = trainer.config.steps_per_execution
        stop = min(self._max_steps, start + each - start % each)
        began = self._clock()
        batches: list[Any] = []
        vote = _STOP
        if not trainer.stop_reason:
            vote, batches = self._await(partial(_fetch, self._source.fetch, start, stop), [])
        if self._group is not None:
            vote |= _DUE if self._clock_says(began) else _GO
            vote, self._due_by_clock = self._group.agree(vote)
        if vote & _PREEMPTED:
            self._leave()
        if vote & _STOP or not batches:
            self._ended = True
            trainer.say(f"stopped behind step {start}: {trainer.stop_reason or 'the data ended'}")
            return
        meter = None if self._timer is None else self._timer.meter
        busy = meter is not None and self._manager.is_saving_in_progress()
        for hook in self._before:
            hook.before_step(trainer)
        self._logs = trainer.execute(batches)
        trainer.step = start + len(batches)
        if isinstance(self._source, IteratorBatchSource):
            self._source.used()
        for hook in self._after:
            hook.after_step(trainer, self._logs)
        beat("step", trainer.step)
        now = self._clock()
        if meter is not None:
            meter.step(now - began, busy)
        self._boundary(now)

    def _await(self, fetch: Callable[[], Any], nothing: Any) -> tuple[int, Any]:
        """What `fetch` gives, or the news that a notice came first: data may be long in coming."""
        try:
            return _GO, self._flag.interruptible(fetch)
        except Interrupted:
            return _PREEMPTED, nothing

    def _boundary(self, now: float) -> None:
        trainer, evaluation = self._trainer, self._evaluation
        config = trainer.config
        due = evaluation is not None and trainer.due(evaluation.every)
        if due or (evaluation is not None and trainer.step >= self._max_steps):
            self._checkpoint(evaluate=True)
            if due:
                self._react()
        elif self._save_due(now):
            self._checkpoint(evaluate=False)
        elif trainer.due(config.save_summary_steps):
            self._write_down(scalars(self._logs), {})
        if trainer.progress.wants(now, trainer.due):
            trainer.progress.update(trainer.step, scalars(self._logs), self._saved, now)

    def _save_due(self, now: float) -> bool:
        every = self._trainer.config.save_checkpoints_steps
        if every is not None:
            return self._trainer.due(every)
        return self._due_by_clock if self._group is not None else self._clock_says(now)

    def _clock_says(self, now: float) -> bool:
        timer = self._timer
        if timer is None or not timer.due(now):
            return False
        # One that is measured is not overtaken by the next.
        return timer.meter is None or not self._manager.is_saving_in_progress()

    def _finish(self) -> None:
        """The last evaluation and the last save, as far as the last boundary had none."""
        if self._evaluation is not None and self._evaluated != self._trainer.step:
            self._checkpoint(evaluate=True)
        elif self._saved != self._trainer.step:
            self._checkpoint(evaluate=False)

    # ---------------------------------------------------------------- evaluation and saves

    def _checkpoint(self, *, evaluate: bool) -> None:
        step, values = self._trainer.step, scalars(self._logs)
        if evaluate:
            self._found, self._evaluated = self._evaluate(), step
        found = self._found if evaluate else {}
        # First, so that a checkpoint never lies behind its rows: those of later steps are cut off.
        self._write_down(values, found)
        if self._saved != step:
            self._save(step, {**values, **_prefixed(found)})

    def _write_down(self, values: Mapping[str, float], found: Mapping[str, float]) -> None:
        trainer = self._trainer
        shown = values if trainer.due(trainer.config.save_summary_steps) else {}
        trainer.summaries.scalars(trainer.step, {**shown, **_prefixed(found)})

    def _save(self, step: int, metrics: Mapping[str, float]) -> None:
        began = self._clock()
        if self._may_save(step, metrics):
            self._before_save()
            if self._manager.save(step, whole(self._trainer, self._source), metrics, force=True):
                self._saved = step
                self._after_save()
        if self._timer is not None:
            now = self._clock()
            self._timer.saved(now)
            if self._timer.meter is not None:
                self._timer.meter.saved(now - began)

    def _before_save(self) -> None:
        for hook in _overriding(self._trainer.hooks, "before_save"):
            hook.before_save(self._trainer)

    def _after_save(self) -> None:
        hooks = _overriding(self._trainer.hooks, "after_save")
        if hooks and self._manager.wait_until_finished():
            for hook in hooks:
                hook.after_save(self._trainer)

    def _may_save(self, step: int, metrics: Mapping[str, float]) -> bool:
        policy = self._trainer.config.nan_metrics
        bad = ", ".join(repr(name) for name, value in metrics.items() if value != value)
        if not bad:
            return True
        what = f"{self._manager.directory}: step {step}: the metric {bad} is NaN"
        if policy == "raise":
            raise TrainError(
                f"{what}, and nan_metrics is 'raise'. Step {step} was not saved; the last checkpoint "
                f"is step {self._saved}. Train on from there with another learning rate or other data."
            )
        saved = policy == "save"
        warnings.warn(
            f"{what}; the step was {'saved all the same' if saved else 'not saved'} "
            f"(nan_metrics={policy!r}).",
            stacklevel=2,
        )
        return saved

    def _evaluate(self) -> dict[str, float]:
        trainer, evaluation = self._trainer, self._evaluation
        assert evaluation is not None
        means = Means()
        batches = evaluation_batches(evaluation.data, evaluation.steps, trainer.strategy)
        while True:
            vote, batch = self._await(partial(next, batches, None), None)
            if self._group is not None:
                vote, _ = self._group.agree(vote)
            if vote & _PREEMPTED:
                self._leave()
            if batch is None:
                beat("step", trainer.step)
                return means.result()
            beat("evaluate", trainer.step)
            means.add(trainer.evaluate_batch(batch))

    def _react(self) -> None:
        """Hand the evaluation to the hooks. An infinity comes back from a checkpoint as NaN, so it is
        NaN from the start."""
        found = {n: value if is_finite(value) else math.nan for n, value in self._found.items()}
        self._reacted = self._trainer.step
        for hook in _overriding(self._trainer.hooks, "after_evaluate"):
            hook.after_evaluate(self._trainer, found)

    # ---------------------------------------------------------------- end

    def _leave(self) -> NoReturn:
        trainer, manager = self._trainer, self._manager
        step = trainer.step
        said = f"{manager.directory}: preempted behind step {step}"
        values = {} if self._logs is None else scalars(self._logs)
        # Behind an evaluation the state is ahead of the checkpoint of this step, which stands for it.
        if step in (self._start, self._reacted) or not self._may_save(step, values):
            manager.wait_until_finished()
            trainer.say(f"{said}; the newest checkpoint is step {manager.latest_step()}")
            manager.exit_preempted()
        trainer.say(f"{said}, which is saved now")
        self._before_save()
        manager.save_and_exit(step, whole(trainer, self._source), values)

    def _close(self, begun: Sequence[Hook]) -> None:
        """End everything, whatever went wrong; the error that came first is the one that is raised."""
        trainer, under_way = self._trainer, sys.exception()
        trainer.manager = None
        problems: list[Exception] = []
        ends = [partial(hook.end, trainer) for hook in begun]
        for end in [*ends, trainer.summaries.close, self._manager.close, trainer.progress.close]:
            try:
                end()
            except Exception as error:  # noqa: BLE001 (raised below, once everything is ended)
                problems.append(error)
        if problems and under_way is None:
            raise problems[0]
        for problem in problems:
            if isinstance(under_way, SystemExit):
                # It is saved, and whoever starts it again must see that by the status.
                warnings.warn(f"while the run ended: {problem!r}", stacklevel=2)
            elif under_way is not None:
                under_way.add_note(f"While the run ended: {problem!r}")


class _StepGroup:
    """The processes of a group, which agree before every step on what is next."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes.channel("loop")

    def agree(self, vote: int) -> tuple[int, bool]:
        """What one of them wants all do; whether it is time for a save the chief's clock says."""
        votes = [data[0] for data in self.processes.gather(bytes([vote]))]
        merged = 0
        for each in votes:
            merged |= each
        return merged, bool(votes[0] & _DUE)


def open_manager(trainer: Trainer, source: BatchSource) -> CheckpointManager:
    """The manager that the configuration asks for."""
    config = trainer.config
    options, hours = config.checkpoint, config.keep_checkpoint_every_n_hours
    if hours is not None:
        options = replace(options, retention=replace(options.retention, keep_every_n_hours=hours))
    return CheckpointManager(
        config.model_dir,
        mirror=config.mirror,
        max_to_keep=config.keep_checkpoint_max,
        options=options,
        recipe=trainer.recipe(source),
        allow=config.allow,
        # Without a strategy nobody said that this process is alone: the manager finds out.
        processes=None if trainer.strategy is None else trainer.processes,
    )


def whole(trainer: Trainer, source: BatchSource) -> StateWithExtras:
    """What a checkpoint holds: the state, and beside it the hooks and the data that have a state."""
    extras: dict[str, Any] = {}
    if members := trainer.members:
        extras["hooks"] = members
    if isinstance(source, IteratorBatchSource):
        extras["data"] = source
    return StateWithExtras(trainer.state, extras)


def _fetch(fetch: Callable[[int], Any], start: int, stop: int) -> list[Any]:
    """The batches of these steps, fewer where the data end."""
    batches: list[Any] = []
    for step in range(start, stop):
        try:
            batches.append(fetch(step))
        except StopIteration:
            break
    return batches


def _overriding(hooks: Sequence[Hook], method: str) -> list[Any]:
    """Hooks that do something there; the others need not be called in every step."""
    base = getattr(Hook, method)
    return [hook for hook in hooks if getattr(type(hook), method, base) is not base]


def _prefixed(found: Mapping[str, float]) -> dict[str, float]:
    return {f"{EVALUATION}{name}": value for name, value in found.items()}
