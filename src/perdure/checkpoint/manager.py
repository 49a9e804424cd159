"""`CheckpointManager`: when to save, what to keep, and where to resume.

In a group every process writes its share and the chief commits. A save is committed in the
background, and its error is raised by the next call of the manager. Invariant: one call at a time
changes a manager, in the process that made it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    SupportsFloat,
)

from perdure.checkpoint.arguments import makes_state, metric_numbers, positive, step_number
from perdure.checkpoint.background import Background
from perdure.checkpoint.call_guard import CallGuard, exclusive, exclusive_also_closed
from perdure.checkpoint.group_save import (
    InCall,
    all_do,
    as_save_error,
    chief_does,
    decline_save,
    load_in_group,
    save_in_group,
)
from perdure.checkpoint.mirror import EXIT_WAIT_S, Mirror
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.checkpoint.pruning import candidates, execute_prune, plan_prune
from perdure.checkpoint.recipe import allowed, check_group, check_resume, checked
from perdure.checkpoint.restore_check import RestoreCheck
from perdure.checkpoint.retention import Retention, ranked
from perdure.errors import (
    ArgumentError,
    ClusterError,
    MismatchError,
    PruneError,
    SaveError,
    StepNotFoundError,
    StoreError,
    WorkerLostError,
)
from perdure.heartbeats import beat, saving
from perdure.process_group import Processes, SingleProcess
from perdure.state import part_filter, part_names, restore_part, snapshot, unflatten
from perdure.state import restore as restore_state
from perdure.state.framework_group import framework_group
from perdure.state.per_rank import Place, placed
from perdure.state.process_random import ProcessRandom
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.store import Leaf, Loaded, Run, Storage
from perdure.store.manifest import RecipeValue
from perdure.store.pack_part import Own
from perdure.store.urls import name_at_step, split_step


class Restored(NamedTuple):
    """A state, and the step whose checkpoint it came from (0 for a fresh one)."""

    state: Any
    step: int


@dataclass(frozen=True)
class ManagerOptions:
    """What a manager does beyond saving at an interval and keeping the newest.

    `retention` says what stays besides the newest `max_to_keep`. `on_error` is what a save that does
    not commit (disk full, permission, ...) means: "raise" it at the next call, or "continue" with a
    warning and try again at the next save; the last good checkpoint stays in both. `codec`
    ("shuffle-zstd") stores chunks smaller where it can, for slow or dear storage; it may change from
    one session to the next, fingerprints do not depend on it, and it needs the extra `zstd`. `clock`
    gives seconds since 1970. `mirror_wait` is how many seconds `close` waits at most for the mirror.

    `save_random_state` saves the random generators that the code of a process shares with every
    checkpoint, and puts them back at the end of a restore: Python's `random`, `numpy.random`,
    PyTorch's (CPU and the devices in use) and Keras's. Each process of a group has its own. They are
    no part of the fingerprint. Turn it off for a manager that restores into a run of another.
    """

    retention: Retention = field(default_factory=Retention)
    on_error: Literal["raise", "continue"] = "raise"
    codec: Literal["shuffle-zstd"] | None = None
    clock: Callable[[], float] = time.time
    save_random_state: bool = True
    mirror_wait: float = 300.0

    def __post_init__(self) -> None:
        if not self.mirror_wait >= 0:
            raise ArgumentError(
                f"mirror_wait: expected at least 0 seconds, found {self.mirror_wait}."
            )
        if self.on_error not in ("raise", "continue"):
            raise StoreError(f"on_error: expected 'raise' or 'continue', found {self.on_error!r}.")


class CheckpointManager(CallGuard):
    """Saves a state every so many steps into a run directory, keeps some, restores the newest good.

    `directory` becomes a run directory at the first save; it must be empty, missing, or one
    already. A step is saved if a multiple of `save_interval_steps` has been passed since the last
    save, or since the restored step. `max_to_keep` (5, as in TensorFlow; None keeps
    all) bounds how many stay; `options` has the rest of it (best by a metric, one an hour, ...) and
    what a failed save means. `recipe` (from `strategy.recipe(dataset)`) is recorded in every
    checkpoint; one of another recipe is refused (`RecipeMismatchError`), save for the fields in `allow`
    and in PERDURE_ALLOW, which are a warning. In a group pass `processes=strategy.processes`: the
    recipes of all are compared too, at the first save or restore; every process makes the same calls,
    and an error in one process is raised in all of them.

    `mirror` (a path, a URL or a `Storage`) is a second run directory that receives a copy of every
    committed checkpoint in the background, under the same retention. It never delays or fails a save:
    a mirror that does not answer or lags is a warning, and is brought up to date after later saves and
    by `close`. A restore takes the newest good checkpoint of either, and warns when that is the
    mirror's.

    Threads may share a manager: their calls run one after the other. After `close`, and in a forked
    child, the calls that change something and `restore` raise `StoreError`. `perdure.load_checkpoint`,
    `all_steps`, `latest_step` and the others that only read manifests still work.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        mirror: str | os.PathLike[str] | Storage | None = None,
        max_to_keep: int | None = 5,
        save_interval_steps: int = 1,
        options: ManagerOptions | None = None,
        recipe: Mapping[str, RecipeValue] | None = None,
        allow: tuple[str, ...] = (),
        processes: Processes | None = None,
    ) -> None:
        self._max_to_keep = None if max_to_keep is None else positive("max_to_keep", max_to_keep)
        self._interval = positive("save_interval_steps", save_interval_steps)
        self._recipe = checked({} if recipe is None else recipe)
        self._allow = allowed(allow)
        self._options = options or ManagerOptions()
        self._run = Run(
            directory, create=True, codec=self._options.codec, clock=self._options.clock
        )
        self._mirror: Mirror | None = None
        if mirror is not None:
            kept, clock = self._options.retention, self._options.clock
            self._mirror = Mirror(self._run, mirror, self._max_to_keep, kept, clock)
        super().__init__(self._run.where)
        self._compared = False
        self._group_given = processes is not None
        self._processes: Processes = processes or SingleProcess()
        self._require_group()
        self._background = Background()
        self._arena = SnapshotBuffer()
        self._restorable = RestoreCheck()
        self._random = ProcessRandom() if self._options.save_random_state else None
        self._last: int | None = None  # the step of the last save or restore
        self._entered = False
        # Neither holds the manager: one that nobody refers to any more lets the next writer in, as in
        # a notebook whose cell is run again.
        self.preemption = PreemptionFlag(describe=partial(_newest, self._run))
        self._finalizer = weakref.finalize(self, _abandon, self._run, self.preemption, self._pid)
        self._finalizer.atexit = False
        self._notes: list[str] = []
        self._told: set[str] = set()
        # A save above this step is new; None until the processes have agreed on it.
        self._highest: int | None = None

    @property
    def directory(self) -> str:
        """Path or URL of the run directory."""
        return self._run.where

    @property
    def checkpoint_interval(self) -> int:
        """`save_interval_steps`, under the name that it has in TensorFlow."""
        return self._interval

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest committed checkpoint as `RUN@STEP`, None before the first.

        `restore`, `Checkpoint.restore` and `perdure.load_checkpoint` accept that name.
        """
        step = self.latest_step()
        return None if step is None else name_at_step(self.directory, step)

    @property
    def checkpoints(self) -> list[str]:
        """The committed checkpoints as `RUN@STEP`, oldest first."""
        return [name_at_step(self.directory, step) for step in self.all_steps()]

    def all_steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return self._run.steps()

    def latest_step(self) -> int | None:
        """The newest committed step, None before the first."""
        steps = self._run.steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """The committed step that is best by the retention's metric, None where none has it."""
        retention = self._options.retention
        if retention.best_metric is None:
            raise StoreError(
                f"{self.directory}: expected a metric to judge by, found none; name it: "
                f"options=ManagerOptions(retention=Retention(best_metric='accuracy'))."
            )
        held = candidates(self._run.contents())
        best = ranked(held, retention.best_metric, retention.best_mode)
        return best[0].step if best else None

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics that `step` was saved with; None stands for NaN or an infinity."""
        return dict(self._run.manifest(step_number(step)).metrics)

    @exclusive
    def pin(self, step: int) -> None:
        """Keep `step` whatever retention says, until `unpin`; durable on return, in every later run.

        May be called twice. In a group every process calls it.

        Raises:
            StepNotFoundError: there is no checkpoint of that step.
        """
        self._change("pin", step, self._run.pin)
        self._update_mirror()

    @exclusive
    def unpin(self, step: int) -> None:
        """Let retention decide about `step` again. May be called twice."""
        self._change("unpin", step, self._run.unpin)
        self._update_mirror()

    def pinned_steps(self) -> list[int]:
        """Steps that were pinned."""
        return sorted(self._run.pinned())

    def fingerprint(self, step: int) -> str:
        """Fingerprint of a committed checkpoint: equal fingerprints are equal bits."""
        return self._run.manifest(step_number(step)).fingerprint

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step without `force`. Changes nothing.

        True for a multiple of the interval, and if a multiple lies between the last saved (or
        restored) step and this one. A forced save counts as a save.
        """
        step = step_number(step)
        if step % self._interval == 0:
            return True
        if (
            self._last is None
        ):  # no restore, no save yet: a run continues from its newest checkpoint
            self._last = self.latest_step() or 0
        return step > self._last and step // self._interval > self._last // self._interval

    @exclusive
    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Save `state` as `step` if it is time, or in any case with `force`; True if it is saved.

        Returns as soon as `state` may change again; the checkpoint is durable once
        `wait_until_finished` or `close` returns. In a group every process calls this at the same steps
        with its own copy of the state, writes its share, and has the same result.

        Args:
            step: an integer from 0, of Python, NumPy or a framework.
            state: a tree of values that a checkpoint takes.
            metrics: numbers that are recorded with it, for retention and for people.
            force: save even if `should_save(step)` is False.

        Raises:
            ArgumentError: `step` is no step, or a metric is no number.
            HistoryError: `step` is at or below the newest committed step, and has other bits or was
                never saved: the checkpoints of a run are one line of steps (see `rollback`).
            MismatchError: the first save could not be restored into the target of this manager's
                restore (without one: into the state itself). A later save warns once if the structure
                changed in such a way.
            UnsupportedLeafError: a value in `state` has no exact form.
            LockedError: another process writes there (in a group: at the next call).
            StateError: in a group, the copies of the state differ (at the next call), except for
                members wrapped in `PerRank`.
            SaveError: the save before this one failed (a warning under `on_error="continue"`).
        """
        step = step_number(step)
        beat("step", step)
        if self._processes.count == 1:  # in a group only where all of them do: in a due save
            self._settle(wait=False)
        if not force and not self.should_save(step):
            return False
        beat("save", step)
        self._settle(wait=True)
        if self._processes.count > 1:
            self._last = step  # also in a process that raises: all decide alike at the next step
        try:
            if self._processes.count == 1:
                self._run.claim()
            is_new = self._is_new(step)
            self._submit(step, state, metrics)
            if not is_new:  # decided in this call, because it may be refused
                if not self._settle(wait=True):
                    return False
                self._highest = step
        except SaveError as error:
            self._tolerate(error, stacklevel=4)
            return False
        finally:
            beat("step", step)
        self._last = step
        return True

    @exclusive_also_closed
    def wait_until_finished(self, *, mirror: bool = False) -> bool:
        """Wait for the save under way; what it saved is durable then. Raises what it raised.

        Under `on_error="continue"` a failed save is a warning here too, `all_steps` lacks it, and this
        returns False. With `mirror` it also waits, for at most `ManagerOptions.mirror_wait` seconds,
        until the mirror has what was saved, and warns if it has not.
        """
        good = self._settle(wait=True)
        if mirror and self._mirror is not None and self._processes.is_chief:
            self._mirror.wait(self._options.mirror_wait)
            self._warn_of_mirror()
        return good

    def is_saving_in_progress(self) -> bool:
        """Whether a save runs in the background."""
        return self._background.busy

    def restore(
        self,
        step: int | str | None = None,
        like: Any = None,
        *,
        leaves: str | Iterable[str] | None = None,
    ) -> Restored:
        """Restore `step`, or the newest good checkpoint, into `like`.

        Containers and arrays come back new; modules, optimizers, PyTorch parameters and other
        stateful objects in `like` are changed in place. Newer checkpoints that are damaged are
        skipped with a warning; if this manager holds the writer's lock they move to quarantine at
        once, otherwise at its first save, so that a manager that only restores changes nothing. The
        random generators of the process are restored last (see `ManagerOptions.save_random_state`).
        In a group every process restores the same step.

        Args:
            step: a step, a name such as `latest_checkpoint`, or None for the newest.
            like: the template; without one the state is nested dicts of NumPy arrays.
            leaves: paths of leaves or of branches (`"model"` for all below it): only these are read
                and replaced, and the rest of `like` stays as it is.

        Raises:
            StepNotFoundError: there is no such checkpoint.
            CorruptionError: the `step` that was asked for is damaged.
            UnreachableError: a checkpoint cannot be read now (no permission, too many open files, no
                answer). This is no damage, and no older checkpoint is used instead.
            MismatchError: `like` does not fit, or has nothing at one of `leaves`.
        """
        restored = self._restore(self._step_named(step), like, leaves)
        if restored is None:
            if like is not None and leaves is None:
                self._expect(like)  # a program that catches the error goes on from this state
            raise StepNotFoundError(
                f"{self.directory}: expected a checkpoint, found none. Save one first, or use "
                f"`restore_or_initialize`."
            )
        beat("compile", restored.step)
        return restored

    def restore_or_initialize(self, init: Any) -> Restored:
        """The newest good checkpoint, or a fresh state at step 0 where there is none.

        `init` is the fresh state, or a function without arguments that makes it; it also serves as
        the template of the restore. Modules can be called too, and are states: only a function, a
        method, a class or a `functools.partial` is called, and what cannot be saved itself.
        """
        self.require_open("restore_or_initialize")
        # Not in turn with other calls: it is the caller's function.
        like = all_do(InCall(self._processes, "init"), init) if makes_state(init) else init
        if (restored := self._restore(None, like, None)) is None:
            self._expect(like)
            restored = Restored(like, 0)
            self._last = 0
            if self._random:
                self._random.begin()
        beat("compile", restored.step)
        return restored

    @exclusive
    def reached_preemption(self, step: int) -> bool:
        """Whether a process of the group got SIGTERM. Every process must ask at the same steps.

        The first call takes over SIGTERM: from then on the signal no longer ends the process, and
        the loop has to, by `save_and_exit`.
        """
        beat("step", step_number(step))
        self.preemption.install()
        return InCall(self._processes, "reached_preemption").any(self.preemption.raised)

    def save_and_exit(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> NoReturn:
        """Save `state` as `step`, wait until it is durable, and leave with exit status 75.

        Raises what the save raised, whatever `on_error` says: status 75 means that it is saved. A
        `TerminationConfig` may name another way to leave.
        """
        self._save_and_exit(step, state, metrics)
        self.exit_preempted()

    @exclusive
    def _save_and_exit(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None
    ) -> None:
        step = step_number(step)
        beat("save", step)
        self._settle(wait=True)
        self.preemption.before_saving(step)
        self._submit(step, state, metrics, leaving=True)
        self._background.wait()

    def exit_preempted(self) -> NoReturn:
        """Leave with exit status 75 once what was saved before is durable, without another save."""
        self._exit_preempted()
        self.preemption.leave()  # not in turn: `exit_fn` is the caller's

    @exclusive
    def _exit_preempted(self) -> None:
        self._settle(wait=True)
        self._closed = True
        if self._mirror is not None:
            left = self.preemption.seconds_left()
            self._mirror.close(EXIT_WAIT_S if left is None else max(0.0, left - 1))
            for note in self._mirror.notes():
                # No warning: it could become an error, and the exit status another one.
                logging.getLogger(__name__).warning("%s", note)
        self._release()
        InCall(self._processes, "exit_preempted").barrier()

    @exclusive
    def claim(self) -> None:
        """Become the writer now and not at the first save; `LockedError` where there is another.

        The directory is a run directory from here on, so that more may be put into it. In a group
        every process calls it, and the chief becomes the writer.
        """
        chief_does(self._processes, "claim()", self._run.begin_writing)
        self._update_mirror()

    @exclusive
    def rollback(self, step: int) -> list[int]:
        """Go back to the checkpoint of `step` for good: newer ones are set aside.

        They can be brought back by `perdure rollback RUN --undo` until something newer is saved, and
        are removed by `perdure prune RUN --rolled-back`. The live state does not change: restore it
        afterwards. Durable on return; after a crash the call can be repeated. In a group every process
        calls this.

        Args:
            step: A committed step, whose checkpoint is read and verified first.

        Returns:
            The steps that were set aside, oldest first; empty if `step` is the newest.

        Raises:
            StepNotFoundError: `step` is not committed.
            CorruptionError: its checkpoint is damaged.
            HistoryError: a newer step is pinned.
            LockedError: another process writes there.
        """
        self._highest = None
        aside = self._change("rollback", step, self._run.rollback)
        self._last = step_number(step)
        self._update_mirror()
        return aside

    @exclusive
    def delete(self, step: int) -> None:
        """Delete one checkpoint, in the mirror too. In a group every process calls it.

        Raises:
            StepNotFoundError: there is no checkpoint of that step.
            StoreError: it is pinned.
            PruneError: deleting stopped in the middle.
        """

        def delete(step: int) -> None:
            if not self._run.delete([step], leave_word=self._mirror is not None):
                self._run.manifest(step)

        self._change("delete", step, delete)
        if self._mirror is not None and self._processes.is_chief:
            # Waited for: a restore would take it from the mirror again.
            self._mirror.delete(step_number(step))
            self._mirror.wait(self._options.mirror_wait)
            self._warn_of_mirror()

    def close(self) -> None:
        """Wait for the save under way, and let another writer in. Raises what the save raised.

        Then it waits for the mirror, `ManagerOptions.mirror_wait` seconds at most, and warns with the
        steps that the mirror still lacks. A closed manager stays closed: calls that change something
        raise `StoreError`. May be called twice; in a forked child it does nothing. While a
        `WorkerLostError` is being raised it does not wait: the save would wait for the lost process.
        """
        if self.in_forked_child:
            return
        self.require_no_call("close")
        beat("end")
        lost = isinstance(sys.exception(), WorkerLostError)
        with self._turn:
            self._closed = True
            try:
                if not (lost and self._background.busy):
                    self._settle(wait=True)
            finally:
                self.preemption.remove()
                try:
                    if self._mirror is not None:
                        self._mirror.close(0.0 if lost else self._options.mirror_wait)
                finally:
                    if not self._background.busy:  # it is, if the wait was interrupted or left out
                        self._release()
                self._warn_of_mirror()

    def __enter__(self) -> CheckpointManager:
        self.require_open("__enter__")
        if self._entered:
            raise StoreError(
                f"{self.directory}: expected one `with` for a manager, found a second one. The first "
                f"closes the manager at its end; make another manager after it."
            )
        self._entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _step_named(self, step: Any) -> int | None:
        """The step that the argument of `restore` means; None for the newest."""
        if not isinstance(step, str):
            return None if step is None else step_number(step)
        run, named = split_step(step)
        if named is None or run != self.directory:
            raise ArgumentError(
                f"step: expected a step, or a name such as {name_at_step(self.directory, 120)!r}, "
                f"found {step!r}. For another run directory use `perdure.load_checkpoint`."
            )
        return named

    def _change(
        self, call: str, step: Any, change: Callable[[int], Sequence[int] | None]
    ) -> list[int]:
        """One change of the run directory by the chief, with the same outcome in every process."""
        step = step_number(step)
        self._settle(wait=True)

        def named() -> Sequence[int] | None:
            try:
                return change(step)
            except OSError as error:
                raise StoreError(
                    f"{self.directory}: {call}({step}) failed: {error}. No checkpoint was lost; try "
                    f"again."
                ) from error

        return chief_does(self._processes, f"{call}({step})", named)

    def _submit(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, SupportsFloat] | None,
        *,
        leaving: bool = False,
    ) -> None:
        self._check_group("save")
        try:
            numbers = metric_numbers({} if metrics is None else metrics)
            drawn = self._random.capture() if self._random else None
            with placed(self._processes.index, self._processes.count) as place:
                leaves = snapshot(state, self._arena, self._restorable.plain)
                self._check_restorable(step, state, leaves, leaving)
        except BaseException as error:
            if self._processes.count > 1:  # the others are saving, and must not wait for this one
                self._background.submit(partial(self._decline, step, error))
                shared = as_save_error(error)
                if shared is not error and isinstance(error, Exception):
                    raise shared from error
            raise
        self._background.submit(
            self.preemption.timed(lambda: self._commit(step, leaves, numbers, place, drawn))
        )

    def _expect(self, like: Any) -> None:
        with placed(self._processes.index, self._processes.count):
            self._restorable.expect(like)

    def _check_restorable(
        self, step: int, state: Any, leaves: Mapping[str, Leaf], leaving: bool
    ) -> None:
        try:
            self._restorable.check_first(f"{self.directory}: step {step}", state, leaves)
        except MismatchError as error:
            if not leaving:
                raise
            warnings.warn(str(error), stacklevel=6)  # better than to lose the state

    def _is_new(self, step: int) -> bool:
        """Whether `step` is above every committed one, so that a save of it continues the run.

        The answer only decides whether the call waits for the save, which decides by itself. The first
        call, and the first after a restore or a rollback, is a collective.
        """
        if self._highest is None:
            newest = -1
            if self._processes.is_chief:
                with suppress(StoreError):  # the save finds the same, and raises it
                    newest = max(self._run.steps(), default=-1)
            self._highest = int(InCall(self._processes, "save").gather(b"%d" % newest)[0])
        is_new = step > self._highest
        self._highest = max(step, self._highest)
        return is_new

    def _decline(self, step: int, error: BaseException) -> None:
        decline_save(self._processes.channel("save"), step, error)

    def _release(self) -> None:
        self._arena.release()
        self._run.close()

    def _commit(
        self,
        step: int,
        leaves: dict[str, Leaf],
        metrics: Mapping[str, float],
        place: Place,
        generators: Mapping[str, Any] | None,
    ) -> None:
        def prune() -> None:
            self._prune(step)

        saving(step)
        if note := self._restorable.changed(f"{self.directory}: step {step}", leaves):
            self._notes.append(note)
        try:
            local = {}
            if self._random and generators is not None:
                local = self._random.leaves(generators, place.index)
            if self._processes.count == 1:
                self._run.save(step, leaves, self._recipe, metrics, local=local)
            else:
                ranked = {}
                if place.members:
                    ranked = {path: leaves.pop(path) for path in [*leaves] if place.owns(path)}
                group, own = self._processes.channel("save"), Own(ranked, local)
                save_in_group(self._run, group, step, leaves, self._recipe, metrics, prune, own)
                return
        finally:
            saving(None)
            notes, self._run.notes = self._run.notes, []
            self._notes += notes
        prune()

    def _prune(self, step: int) -> None:
        try:
            self._apply_retention(step)
        finally:
            self._update_mirror()

    def _update_mirror(self) -> None:
        if self._mirror is not None and self._processes.is_chief:
            self._mirror.notify()

    def _warn_of_mirror(self) -> None:
        if self._mirror is not None:
            for note in self._mirror.notes():
                warnings.warn(note, stacklevel=5)

    def _apply_retention(self, step: int) -> None:
        if self._max_to_keep is None:
            return
        in_use = None if self._mirror is None else self._mirror.copying
        plan = plan_prune(
            self._run, self._max_to_keep, self._options.retention, saved=step, in_use=in_use
        )
        if plan.store.held_back:
            self._notes.append(f"{self.directory}: packs stay: {plan.store.held_back}")
        if plan.store.empty:
            return
        for pack, why in execute_prune(self._run, plan).left.items():
            self._notes.append(f"{self.directory}: {pack} was not compacted: {why}")

    def _settle(self, *, wait: bool) -> bool:
        """Raise the error of the background save, or warn and return False if that was asked for."""
        good = True
        try:
            if wait:
                self._background.wait()
            else:
                self._background.check()
        except (SaveError, PruneError) as error:
            self._tolerate(error)
            good = isinstance(error, PruneError)  # it comes after the commit
        if not self._background.busy:
            notes, self._notes = self._notes, []
            for note in notes:
                if note not in self._told:
                    self._told.add(note)
                    warnings.warn(note, stacklevel=4)
        self._warn_of_mirror()
        return good

    def _tolerate(self, error: StoreError, stacklevel: int = 5) -> None:
        if self._options.on_error == "raise":
            raise error
        warnings.warn(
            f"{error} Training goes on; the next save tries again.", stacklevel=stacklevel
        )

    @exclusive
    def _restore(
        self, step: int | None, like: Any, leaves: str | Iterable[str] | None
    ) -> Restored | None:
        names = None if leaves is None else part_names(leaves)
        beat("restore")
        self._settle(wait=True)
        self._highest = None
        InCall(self._processes, "restore").barrier()
        self._check_group("restore")
        wanted = None if names is None else part_filter(names)
        found, elsewhere = load_in_group(self._run, self._processes, step, wanted, self._mirror)
        for note in found.notes:
            warnings.warn(f"{self.directory}: {note}", stacklevel=6)
        if (loaded := found.loaded) is None:
            return None
        if self._processes.is_chief:
            self._set_aside(loaded, elsewhere)

        def rebuild() -> Any:
            self._check_recipe(loaded)
            with placed(self._processes.index, self._processes.count):
                if like is None:
                    return unflatten(loaded.leaves)
                if names is not None:
                    return restore_part(like, loaded.leaves, names)
                self._restorable.expect(like)
                restored = restore_state(like, loaded.leaves)
                self._restorable.restored(loaded.leaves)
                return restored

        state = all_do(self._processes, rebuild)
        if names is None:
            self._last = loaded.manifest.step
            self._restore_random(loaded)
        return Restored(state, loaded.manifest.step)

    def _restore_random(self, loaded: Loaded) -> None:
        """The last part of a restore: what comes before may draw random numbers."""
        if self._random is None:
            return
        where = f"{self.directory}: step {loaded.manifest.step}"
        for note in self._random.restore(loaded.local, self._processes, where):
            warnings.warn(note, stacklevel=6)

    def _set_aside(self, loaded: Loaded, elsewhere: Collection[int]) -> None:
        for step, reason in loaded.skipped:
            if step in elsewhere:
                where = "It stays where it is, because process 0 can read it."
            elif not self._run.is_writer:
                # A process that only reads, beside a trainer, never takes the lock for this.
                self._run.defer_quarantine(step)
                where = "It stays where it is; the first save moves it to quarantine."
            else:
                try:
                    where = f"It was moved to {self._run.quarantine(step, reason)}."
                except StoreError as error:
                    where = f"It stays where it is: {error}"
            newest = loaded.manifest.step
            instead = f"step {newest}" if step != newest else "its copy in the mirror"
            warnings.warn(
                f"{self.directory}: step {step} is damaged and was skipped; {instead} was restored "
                f"instead: {reason} {where}",
                stacklevel=5,
            )

    def _check_recipe(self, loaded: Loaded) -> None:
        where = f"{self.directory}: step {loaded.manifest.step}"
        note = check_resume(where, loaded.manifest.recipe, self._recipe, self._allow)
        if note and self._processes.is_chief:
            warnings.warn(note, stacklevel=7)

    def _require_group(self) -> None:
        """Raise where the framework knows of other processes and this manager does not.

        Each of them would take itself for the only writer.
        """
        group = None if self._group_given else framework_group()
        if group is not None and group.count > 1:
            raise ClusterError(
                f"{self.directory}: {group.source} says that this is process {group.index} of "
                f"{group.count}, and the manager was not given the group. Make it in every process as "
                f"CheckpointManager(..., processes=perdure.initialize_distributed({group.engine!r})), "
                f"or with strategy.processes. For a directory that this process alone uses, pass "
                f"processes=perdure.checkpoint.SingleProcess()."
            )

    def _check_group(self, call: str) -> None:
        """Once: the recipe with its dataset, which the strategy could not compare."""
        if not self._compared:
            note = check_group(InCall(self._processes, call), self._recipe, self._allow)
            self._compared = True
            if note:
                warnings.warn(note, stacklevel=5)


def _newest(run: Run) -> str:
    """For people, when time runs out."""
    steps = run.steps()
    return (
        f"The newest committed checkpoint in {run.where} is step {steps[-1]}."
        if steps
        else f"{run.where} holds no checkpoint yet."
    )


def _abandon(run: Run, preemption: PreemptionFlag, pid: int) -> None:
    """What `close` does for a manager that nobody refers to any more; its save has ended then."""
    if os.getpid() != pid:  # the lock is the parent's
        return
    preemption.abandon()
    run.close()
