"""`Loop`: one call of `Trainer.train`, from the restore to the last save.

After each execution (one step, or `steps_per_execution` of them) the order is:

    after_step hooks, evaluation, summaries, save, after_evaluate hooks, next batches, preemption

If a hook raises in `after_step`, the other hooks are called and the save that is due is made first.

Invariant: what the checkpoint of a step holds is a function of the step. So the checkpoint of an
evaluated step is saved before hooks may change the state because of the evaluation. A resume at such
a step calls these hooks again with the metrics of the checkpoint, or evaluates again if the evaluation
was interrupted.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any, NoReturn

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.checkpoint.address import find_step
from perdure.checkpoint.preemption import Interrupted
from perdure.errors import TrainError
from perdure.runtime.heartbeats import beat
from perdure.state import StateWithExtras
from perdure.train.batch_source import BatchSource, IteratorBatchSource, evaluation_batches
from perdure.train.interval import SaveTimer
from perdure.train.summaries import Means, scalars
from perdure.train.training_state import Computation, TrainingState

EVALUATION_PREFIX = "eval/"
"""Before the names of an evaluation's metrics, in summaries and in checkpoints."""

_PREEMPTED, _SAVE_DUE, _STOP = 1, 2, 4


@dataclass
class _Evaluated:
    step: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    handed_over: bool = False


class Loop:
    """Trains up to a step. `run` may be called once; `extras` are saved besides the state.

    Training ends at `max_steps`, or `steps` after the checkpoint that it resumes from, or when the data
    end or a hook stops it.
    """

    def __init__(
        self,
        training: TrainingState,
        computation: Computation,
        source: BatchSource,
        manager: CheckpointManager,
        extras: Mapping[str, Any],
        hooks: Sequence[Any],
        waits_for_saves: bool,
        max_steps: int | None,
        steps: int | None = None,
        evaluation_data: Any = None,
        evaluation_every: int | None = None,
        evaluation_batches: int | None = None,
    ) -> None:
        self._training, self._computation, self._source = training, computation, source
        self._manager = training.manager = manager
        self._extras, self._hooks, self._waits_for_saves = extras, hooks, waits_for_saves
        self._begun: list[Any] = []  # hooks that have an `end`
        self._max_steps: float = math.inf if max_steps is None else max_steps
        self._steps = steps
        self._evaluation_data, self._evaluation_every = evaluation_data, evaluation_every
        self._evaluation_batches = evaluation_batches
        processes = computation.processes
        self._group = processes.channel("loop") if processes.count > 1 else None
        self._restored_step = 0
        self._saved_step: int | None = None
        self._shown_step: int | None = None
        every = training.config.save_interval_secs
        self._timer = None if every is None else SaveTimer(every, training.config.clock())
        self._journal = manager.journal if manager.journal.records_saves else None
        manager.preemption.config = training.config.checkpoint.termination
        self._logs: Any = None
        self._evaluated = _Evaluated()

    def run(self) -> dict[str, float]:
        """Train, and return the metrics of the last evaluation; SystemExit after a preemption."""
        training, manager = self._training, self._manager
        try:
            manager.preemption.install()
            self._resume()
            training.progress.begin(training.step, self._max_steps, training.config.clock())
            self._computation.note_into(self._journal)
            self._computation.donate(True)
            for hook in self._hooks:
                self._begun.append(hook)
                hook.begin(training)
            self._repeat_evaluation_hooks()
            if training.step >= self._max_steps:
                training.say(f"max_steps {self._max_steps} has been reached already: nothing to do")
            while training.step < self._max_steps and self._execute():
                pass
            if self._evaluation_every is not None and self._evaluated.step != training.step:
                self._checkpoint(evaluate=True)
            elif self._saved_step != training.step:
                self._checkpoint(evaluate=False)
            manager.wait_until_finished()
            if training.progress.in_notebook:  # the output stays, so it has to show the last step
                now = training.config.clock()
                training.progress.update(training.step, scalars(self._logs), self._saved_step, now)
            if self._agree(_PREEMPTED if manager.preemption.raised else 0) & _PREEMPTED:
                self._leave()  # the program may not get to the end of what follows the training
            return self._evaluated.metrics
        finally:
            self._close()

    def _resume(self) -> None:
        training, manager = self._training, self._manager
        manager.claim()
        target = StateWithExtras(training._target, self._extras)
        restored = manager.restore_or_initialize(target)
        training.state, training.step = restored.state.main, restored.step
        self._restored_step = self._saved_step = restored.step
        # A state that came from the mirror is not fresh, even if the run directory is empty.
        is_new = restored.step == 0 and manager.latest_step() is None
        if is_new and training.warm_start_from is not None:
            run, step = find_step(training.warm_start_from)
            options = ManagerOptions(save_random_state=False)
            with CheckpointManager(run.storage, options=options, recipe={}) as other:
                training.state = other.restore(step, training._target, strict=False).state
        if self._group is not None:
            self._group.barrier()  # else another process could see the first save of process 0
        if self._steps is not None:
            self._max_steps = training.step + self._steps
        training.summaries.open(training.step)
        if is_new:
            # A disk that takes no checkpoint is found before the work, and the next call finds the
            # fresh state even if steps have changed it in place.
            manager.save(0, self._tree(), force=True)
            training.say(f"{manager.directory}: a new run")
        else:
            training.say(f"{manager.directory}: resuming after step {training.step}")
        if self._computation.processes.is_chief and training.summaries.directory is None:
            training.say("no summaries: the run directory is not local; name a summary_dir")

    def _call(self, name: str, *arguments: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(self._training, *arguments)

    def _agree(self, vote: int) -> int:
        """The votes of all processes joined; whether a save is due is for process 0's clock alone."""
        if self._group is None:
            return vote
        return self._group.agree(bytes([vote]), _joined)[0]

    def _execute(self) -> bool:
        training, source, timer = self._training, self._source, self._timer
        clock, size = training.config.clock, training.config.steps_per_execution
        start = training.step
        stop = int(min(self._max_steps, start + size - start % size))
        began = clock()
        vote, batches = _STOP, []
        if not training.stop_reason:
            vote, batches = self._wait_for(partial(_fetch, source.fetch, start, stop), [])
        if self._group is not None and self._due_by_clock(began):
            vote |= _SAVE_DUE
        vote = self._agree(vote)
        if vote & _PREEMPTED:
            self._leave()
        if vote & _STOP or not batches:
            training.say(f"stopped after step {start}: {training.stop_reason or 'the data ended'}")
            return False
        busy = timer is not None and timer.is_measuring and self._manager.is_saving_in_progress()
        self._call("before_step")
        self._logs = self._computation.train(training, batches)
        training.step = start + len(batches)
        if isinstance(source, IteratorBatchSource):
            source.used()
        failure: Exception | None = None
        for hook in self._hooks:
            try:
                hook.after_step(training, self._logs)
            except Exception as error:  # noqa: BLE001 (raised below, after the others)
                failure = failure or error
        if failure is None:
            self._record()
        beat("step", training.step)
        now = clock()
        if timer is not None:
            timer.step(now - began, busy)
        self._after_execution(now, vote, failure)
        return True

    def _wait_for(self, fetch: Callable[[], Any], nothing: Any) -> tuple[int, Any]:
        """(0, what `fetch` returns), or (_PREEMPTED, nothing) if a notice comes first."""
        try:
            return 0, self._manager.preemption.interruptible(fetch)
        except Interrupted:
            return _PREEMPTED, nothing

    def _record(self) -> None:
        journal, step = self._journal, self._training.step
        if journal is not None and journal.wants(step):
            journal.record(step, self._tree(), metrics=scalars(self._logs))
        elif journal is not None:
            journal.skip(step)

    def _after_execution(self, now: float, vote: int, failure: Exception | None) -> None:
        training, every = self._training, self._evaluation_every
        evaluation_due = every is not None and training.due(every)
        evaluates = evaluation_due or (every is not None and training.step >= self._max_steps)
        if failure is not None:
            saves = evaluates or self._save_due(now, vote)
            if saves:  # a step that is not saved is repeated, and its line of the journal with it
                self._record()
            if evaluates:  # a resume makes up for the evaluation, and for its row
                self._save(scalars(self._logs))
            elif saves:
                self._checkpoint(evaluate=False)
            raise failure
        if evaluates:
            self._checkpoint(evaluate=True)
            if evaluation_due:
                self._call_evaluation_hooks()
        elif self._save_due(now, vote):
            self._checkpoint(evaluate=False)
        elif training.due(training.config.save_summary_steps):
            self._write_summary(scalars(self._logs), {})
        if training.progress.wants(now, training.due):
            training.progress.update(training.step, scalars(self._logs), self._saved_step, now)

    def _save_due(self, now: float, vote: int) -> bool:
        every = self._training.config.save_checkpoints_steps
        if every is not None:
            return self._training.due(every)
        if self._group is not None:
            return bool(vote & _SAVE_DUE)
        return self._due_by_clock(now)

    def _due_by_clock(self, now: float) -> bool:
        """Whether the interval in seconds has passed. A save that is measured ends before the next."""
        timer = self._timer
        if timer is None or not timer.due(now):
            return False
        return not (timer.is_measuring and self._manager.is_saving_in_progress())

    def _checkpoint(self, *, evaluate: bool) -> None:
        step, values = self._training.step, scalars(self._logs)
        if evaluate:
            self._evaluated = _Evaluated(step, self._evaluate())
        metrics = _prefixed(self._evaluated.metrics) if evaluate else {}
        # Before the save, so that a checkpoint has its rows: a resume cuts off those of later steps.
        self._write_summary(values, metrics)
        if self._saved_step != step:
            self._save({**values, **metrics})

    def _write_summary(self, values: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        training = self._training
        is_due = training.due(training.config.save_summary_steps)
        shown = values if is_due and self._shown_step != training.step else {}
        self._shown_step = training.step if shown else self._shown_step
        training.summaries.scalars(training.step, {**shown, **metrics})

    def _tree(self) -> StateWithExtras:
        return StateWithExtras(self._training.state, self._extras)

    def _save(self, metrics: Mapping[str, float]) -> None:
        step, clock = self._training.step, self._training.config.clock
        began = clock()
        if self._allows(metrics):
            self._call("before_save")
            if self._manager.save(step, self._tree(), metrics, force=True):
                self._saved_step = step
                if self._waits_for_saves and self._manager.wait_until_finished():
                    self._call("after_save")
        if self._timer is not None:
            now = clock()
            self._timer.saved(now, now - began)

    def _allows(self, metrics: Mapping[str, float]) -> bool:
        step, policy = self._training.step, self._training.config.checkpoint.nan_metrics
        names = ", ".join(repr(name) for name, value in metrics.items() if value != value)
        if not names:
            return True
        problem = f"{self._manager.directory}: step {step}: the metric {names} is NaN"
        if policy == "raise":
            raise TrainError(
                f"{problem}, and nan_metrics is 'raise'. Step {step} was not saved; the last "
                f"checkpoint is step {self._saved_step}. Resume from it with another learning rate or "
                f"other data."
            )
        saved = policy == "save"
        warnings.warn(
            f"{problem}; the step was {'saved all the same' if saved else 'not saved'} "
            f"(nan_metrics={policy!r}).",
            stacklevel=2,
        )
        return saved

    def _evaluate(self) -> dict[str, float]:
        means = Means()
        batches = evaluation_batches(
            self._evaluation_data, self._evaluation_batches, self._computation.strategy
        )
        while True:
            vote, batch = self._wait_for(partial(next, batches, None), None)
            if self._agree(vote) & _PREEMPTED:
                self._leave()
            if batch is None:
                beat("step", self._training.step)
                return means.result()
            beat("evaluate", self._training.step)
            means.add(self._computation.evaluate(self._training.state, batch))

    def _repeat_evaluation_hooks(self) -> None:
        """At a resumed step that is evaluated: what hooks changed after its save is changed again."""
        training, every = self._training, self._evaluation_every
        if every is None or not training.step:
            return
        if not training.due(every) and training.step < self._max_steps:
            return
        numbers = self._manager.metrics(training.step)
        metrics = {
            name.removeprefix(EVALUATION_PREFIX): value
            for name, value in numbers.items()
            if name.startswith(EVALUATION_PREFIX)
        }
        if not metrics:  # the run was preempted in that evaluation, and saved without its metrics
            metrics = self._evaluate()
            self._write_summary(numbers, _prefixed(metrics))
            self._save({**numbers, **_prefixed(metrics)})
        self._evaluated = _Evaluated(training.step, metrics)
        if training.due(every):  # as after the execution: the last one of a call is for its caller
            self._call_evaluation_hooks()

    def _call_evaluation_hooks(self) -> None:
        self._evaluated.handed_over = True
        self._call("after_evaluate", self._evaluated.metrics)

    def _leave(self) -> NoReturn:
        training, manager, evaluated = self._training, self._manager, self._evaluated
        step = training.step
        text = f"{manager.directory}: preempted after step {step}"
        values = {} if self._logs is None else scalars(self._logs)
        # After `after_evaluate` the state is ahead of the checkpoint of this step, which is the one to
        # resume from.
        is_saved = evaluated.handed_over and evaluated.step == step
        if is_saved or step == self._restored_step or not self._allows(values):
            manager.wait_until_finished()
            training.say(f"{text}; the newest checkpoint is step {manager.latest_step()}")
            manager.exit_preempted()
        training.say(f"{text}; saving it now")
        self._call("before_save")
        manager.save_and_exit(step, self._tree(), values)

    def _close(self) -> None:
        """Close everything, whatever went wrong; the first error is the one that is raised."""
        training, active = self._training, sys.exception()
        training.manager = None
        self._computation.note_into(None)
        self._computation.donate(False)  # the state that is returned is the caller's
        problems: list[Exception] = []
        closes = [training.summaries.close, self._manager.close]
        for close in [*(partial(hook.end, training) for hook in self._begun), *closes]:
            try:
                close()
            except Exception as error:  # noqa: BLE001 (raised below, after everything was closed)
                problems.append(error)
        if problems and active is None:
            raise problems[0]
        for problem in problems:
            if isinstance(active, SystemExit):
                # The step is saved, and the exit status must tell so.
                warnings.warn(f"while the run ended: {problem!r}", stacklevel=2)
            elif active is not None:
                active.add_note(f"While the run ended: {problem!r}")


def _fetch(fetch: Callable[[int], Any], start: int, stop: int) -> list[Any]:
    batches: list[Any] = []
    for step in range(start, stop):
        try:
            batches.append(fetch(step))
        except StopIteration:
            break
    return batches


def _prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{EVALUATION_PREFIX}{name}": value for name, value in metrics.items()}


def _joined(sent: list[bytes]) -> bytes:
    votes = [data[0] for data in sent]
    return bytes([reduce(or_, votes) & ~_SAVE_DUE | votes[0] & _SAVE_DUE])
