"""The run directory of a manager, besides saving and restoring: lists, reads (also after `close`),
pins, deletes and rolls back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from types import NoneType
from typing import Any, Concatenate, ParamSpec, TypeVar

from perdure.checkpoint.address import step_or_name
from perdure.checkpoint.arguments import step_number
from perdure.checkpoint.checkpoint import makes_state
from perdure.checkpoint.group_call import together
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.checkpoint.retention import Retention, candidates, ranked, recorded_retention
from perdure.checkpoint.saver import Saver
from perdure.errors import ArgumentError, StepNotFoundError, StoreError
from perdure.runtime.process_group import Processes
from perdure.state.snapshots import metadata_tree
from perdure.store import Run
from perdure.store.drill_hook import drill_hook
from perdure.store.manifest import RecipeValue
from perdure.store.urls import name_at_step

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="ManagedDirectory")


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that changes something: one at a time, in the process that made the object, until
    `close`."""
    name = method.__name__.lstrip("_")

    @wraps(method)
    def in_turn(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        self.require_open(name)
        self.require_no_call(name)
        with self._turn:
            self.require_open(name)  # another thread may have closed it meanwhile
            return method(self, *args, **kwargs)

    return in_turn


class ManagedDirectory:
    """Base of a manager; see `CheckpointManager`."""

    _options: ManagerOptions
    _processes: Processes
    _saver: Saver
    _interval: SaveInterval

    def __init__(
        self, run: Run, retention: Retention | None, recipe: Mapping[str, RecipeValue] | None = None
    ) -> None:
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._run = run
        self._retention = retention
        if (hook := drill_hook()) is None:
            return
        hook.note("recipe", run.where, recipe=dict(recipe or {}))
        if (best := self._rules()).best_metric is not None:
            rule = {"metric": best.best_metric, "mode": best.best_mode, "keep": best.best_to_keep}
            hook.note("retention", run.where, **rule)

    @property
    def is_chief(self) -> bool:
        """Whether this process is number 0 of its group, which commits. True without a group."""
        return self._processes.is_chief

    @property
    def in_forked_child(self) -> bool:
        """Whether another process made this object."""
        return os.getpid() != self._pid

    def require_process(self, call: str) -> None:
        """Raise `StoreError` if another process made the object."""
        if self.in_forked_child:
            raise StoreError(
                f"{self.directory}: {call} was called in a forked child (pid {os.getpid()}) of the "
                f"process that made this manager (pid {self._pid}), which alone may change the run. "
                f"Nothing was changed. Call it there; to read here, use `perdure.load_checkpoint`."
            )

    def require_open(self, call: str) -> None:
        """Raise `StoreError` if another process made the object, or it is closed."""
        self.require_process(call)
        if self._closed:
            raise StoreError(
                f"{self.directory}: {call} was called on a manager that is closed. Nothing was "
                f"changed. Make a new CheckpointManager for this directory."
            )

    def require_no_call(self, call: str) -> None:
        """Raise `StoreError` inside another exclusive call of this thread, which it would wait for."""
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise StoreError(
                f"{self.directory}: {call} was called by a signal handler or a callback in the middle "
                f"of another call of this manager in the same thread. Nothing was changed. Set a flag "
                f"there, and call {call} in the loop."
            )

    @property
    def directory(self) -> str:
        """Path or URL of the run directory."""
        return self._run.where

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint as `RUN@STEP`, for `restore`, after the save under way; or None."""
        self._saver.background.join()
        step = self.latest_step()
        return None if step is None else name_at_step(self.directory, step)

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints as `RUN@STEP`, oldest first, after the save under way."""
        self._saver.background.join()
        return [name_at_step(self.directory, step) for step in self.all_steps()]

    @property
    def checkpoint_interval(self) -> int:
        """`save_interval_steps`, under the name that it has in TensorFlow."""
        return self._interval.steps

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step without `force`: a multiple of the interval lies
        between the last saved (or restored) step and this one, or is it. Changes nothing."""
        return self._interval.is_due(step_number(step))

    def is_saving_in_progress(self) -> bool:
        """Whether a save runs in the background."""
        return self._saver.background.busy

    def all_steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return self._run.steps()

    def latest_step(self) -> int | None:
        """The newest committed step, None before the first."""
        return self._run.newest_step()

    def best_step(self) -> int | None:
        """The committed step that is best by the retention's metric; None if no step has it. Raises
        `StoreError` if the retention names no metric."""
        rules = self._rules()
        if rules.best_metric is None:
            raise StoreError(
                f"{self.directory}: expected a metric to judge by, found none; name it: "
                f"options=ManagerOptions(retention=Retention(best_metric='accuracy'))."
            )
        view = self._run.contents()
        readable = candidates(view.summaries, view.pinned)
        best = ranked(readable, rules.best_metric, rules.best_mode)
        return best[0].step if best else None

    def _rules(self) -> Retention:
        if self._retention is not None:
            return self._retention
        recorded = recorded_retention(self._run)
        return Retention() if recorded is None else recorded.retention

    def metrics(self, step: int | str) -> dict[str, float]:
        """The metrics that a checkpoint was saved with, by a step or a name (`RUN@best`)."""
        stored = self._run.manifest(self._step(step)).metrics
        return {name: float(value) for name, value in stored.items()}

    def pinned_steps(self) -> list[int]:
        """Steps that were pinned, oldest first."""
        return sorted(self._run.pinned())

    def fingerprint(self, step: int | str) -> str:
        """Fingerprint of a committed checkpoint: equal fingerprints are equal bits. As `metrics`."""
        return self._run.manifest(self._step(step)).fingerprint

    def metadata(self, step: int | str | None = None) -> Any:
        """What a checkpoint holds, as nested dicts. Reads its manifest and no array. None is the
        newest step.

        An array is a `jax.ShapeDtypeStruct` if this process has imported JAX, otherwise a pair with
        the attributes `dtype` (its name) and `shape`. A Python scalar is its value. Raises
        `StepNotFoundError`, or `CorruptionError` for a damaged manifest.
        """
        number = self._step(f"{self.directory}@latest" if step is None else step)
        return metadata_tree(self._run.manifest(number).leaves)

    @exclusive
    def claim(self) -> None:
        """Become the writer now and not at the first save, so that more may be put into the run
        directory.

        In a group every process calls this. Raises `LockedError` if there is another writer.
        """
        together(self._processes, self._run.begin_writing, by_chief=NoneType, call="claim()")
        self._saver.update_mirror()

    @exclusive
    def pin(self, step: int) -> None:
        """Keep `step` whatever retention says, until `unpin`; durable on return, in every later
        run.

        In a group every process calls it. Raises `StepNotFoundError`.
        """
        self._change("pin", step, self._run.pin)
        self._saver.update_mirror()

    @exclusive
    def unpin(self, step: int) -> None:
        """Let retention decide about `step` again. May be called twice."""
        self._change("unpin", step, self._run.unpin)
        if (mirror := self._saver.mirror) is not None and self._processes.is_chief:
            mirror.unpin(step_number(step))

    @exclusive
    def rollback(self, step: int) -> list[int]:
        """Go back to the checkpoint of `step`, which is read and verified, for good: newer ones are
        set aside.

        `perdure rollback RUN --undo` brings them back until something newer is saved; `perdure
        prune RUN --rolled-back` removes them. The live state does not change: restore it
        afterwards. Durable on return; after a crash the call can be repeated. In a group every
        process calls this. Returns the steps that were set aside, oldest first.

        Raises:
            StepNotFoundError: `step` is not committed.
            CorruptionError: Its checkpoint, or a line of the journal up to it, is damaged.
            HistoryError: A newer step is pinned.
            LockedError: Another process writes there.
        """
        self._saver.forget_highest()
        steps = self._change("rollback", step, self._run.rollback)
        self._interval.record(step_number(step))
        self._saver.update_mirror()
        return steps

    @exclusive
    def delete(self, step: int) -> None:
        """Delete one checkpoint, in the mirror too. In a group every process calls this.

        Raises:
            StepNotFoundError: There is no checkpoint of that step.
            StoreError: It is pinned.
            PruneError: Deleting stopped in the middle.
        """

        def delete(step: int) -> None:
            if not self._run.delete([step], log_removal=self._saver.mirror is not None):
                self._run.manifest(step)

        self._change("delete", step, delete)
        mirror = self._saver.mirror
        if mirror is not None and self._processes.is_chief:
            # Waited for: a restore would take it from the mirror again.
            mirror.notify()
            mirror.wait(self._options.mirror_wait)
            self._saver.warn_of_mirror()

    def _change(
        self, call: str, step: Any, change: Callable[[int], Sequence[int] | None]
    ) -> list[int]:
        """One change of the run directory by the chief, with the same outcome in every process."""
        step = step_number(step)
        self._saver.settle(wait=True)

        def change_step() -> list[int]:
            try:
                return list(change(step) or ())
            except OSError as error:
                raise StoreError(
                    f"{self.directory}: {call}({step}) failed: {error}. No checkpoint was lost; try "
                    f"again."
                ) from error

        return together(self._processes, change_step, by_chief=list[int], call=f"{call}({step})")

    def _step(self, step: int | str) -> int:
        if not isinstance(step, str):
            return step_number(step)
        number = step_or_name(step, self._run)
        if number is None and (number := self.latest_step()) is None:
            raise StepNotFoundError(f"{self.directory}: expected a checkpoint, found none.")
        return number


class SaveInterval:
    """Says when a multiple of `steps` has been passed since the last save or restore in `run`. Both
    survive an interruption, so an interrupted run saves at the same steps as an uninterrupted one.
    """

    def __init__(self, steps: int, run: Run) -> None:
        self.steps = steps
        self._last: int | None = None
        self._run = run

    def record(self, step: int) -> None:
        """`step` has been saved or restored."""
        self._last = step

    def is_due(self, step: int) -> bool:
        """Whether a save is due at `step`. Changes nothing."""
        if step % self.steps == 0:
            return True
        last = self.last  # once: another thread may save meanwhile
        return step > last and step // self.steps > last // self.steps

    def step_of(self, given: Any, counter: Any) -> int:
        """The step of a save: `given`, or the value of `counter`, or the step after the last."""
        if given is not None:
            return step_number(given)
        if counter is not None:
            return step_number(counter() if makes_state(counter) else counter)
        if self.steps > 1:
            raise ArgumentError(
                f"save() without a step: expected a `step_counter`, because one of every "
                f"{self.steps} steps is saved, found none. Write save(step)."
            )
        return self.last + 1

    @property
    def last(self) -> int:
        """The step that was saved or restored last; 0 before the first."""
        return self._newest if self._last is None else self._last

    @cached_property
    def _newest(self) -> int:
        """A run without a restore or save continues from its newest checkpoint; listed once."""
        return self._run.newest_step() or 0


def describe_newest(run: Run) -> str:
    """A sentence on the newest checkpoint."""
    steps = run.steps()
    return (
        f"The newest committed checkpoint in {run.where} is step {steps[-1]}."
        if steps
        else f"{run.where} holds no checkpoint yet."
    )
