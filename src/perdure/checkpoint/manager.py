"""`CheckpointManager`: when to save, what to keep, and where to resume.

Invariant: one call at a time changes a manager, in the process that made it. In a group every process
makes the same calls, and has the same outcome.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from types import NoneType
from typing import Any, NoReturn, overload

from perdure.checkpoint.address import refuse_checkpoint_name, step_or_name
from perdure.checkpoint.arguments import (
    Metrics,
    call_init,
    integer,
    require_kind,
    require_state,
    step_number,
)
from perdure.checkpoint.checkpoint import (
    Checkpoint,
    kept_members,
    makes_state,
    managers,
    takes_tensorflow_order,
)
from perdure.checkpoint.group_call import GroupCall, require_group, together
from perdure.checkpoint.journal import Journal
from perdure.checkpoint.managed_directory import (
    ManagedDirectory,
    SaveInterval,
    describe_newest,
    exclusive,
)
from perdure.checkpoint.manager_options import ManagerOptions, Restored
from perdure.checkpoint.mirror import EXIT_WAIT_S, Mirror
from perdure.checkpoint.preemption import PreemptionFlag, report
from perdure.checkpoint.recipe import RecipeCheck
from perdure.checkpoint.restorer import Restorer
from perdure.checkpoint.saver import Saver, abandon
from perdure.errors import StepNotFoundError, StoreError, WorkerLostError, warn_caller
from perdure.runtime.heartbeats import beat, committed, reporting_refusal
from perdure.runtime.process_group import Processes, group_of
from perdure.state.restore_request import RestoreRequest
from perdure.state.walk import LazyWalk
from perdure.store import Run, Storage
from perdure.store.gc_pause import gc_paused
from perdure.store.manifest import RecipeValue
from perdure.store.urls import name_at_step
from perdure.tensorflow_names import TensorFlowNames, names_forms


class CheckpointManager(ManagedDirectory, TensorFlowNames):
    """Saves a state every so many steps into a run directory, keeps some, restores the newest good.

    Every committed checkpoint survives a crash and a power loss. Threads may share a manager. After
    `close`, and in a forked child, calls that change something and `restore` raise `StoreError`. In
    a group every process makes the same calls; an error in one is raised in all.

    TensorFlow's arguments work too, in their order: (checkpoint, directory, max_to_keep,
    keep_checkpoint_every_n_hours), `checkpoint_interval` and `step_counter`. `save()` then saves
    the checkpoint, and `checkpoint.restore(manager.latest_checkpoint)` resumes the run.

    Args:
        directory: Path, URL or `Storage` of the run directory. It must be empty, missing, or a run
            directory already. The first `restore_or_initialize` or `save` makes it one and takes
            the writer's lock, which `restore` never does.
        mirror: A second run directory, which receives a copy of every committed checkpoint in the
            background, under the same retention. It never delays or fails a save. A restore takes
            the newest good checkpoint of either, and warns if that is the mirror's.
        max_to_keep: How many of the newest checkpoints stay, as in TensorFlow; None keeps all.
        save_interval_steps: A step is saved if a multiple of this has been passed since the last
            save, or since the restored step.
        options: Which other checkpoints stay, what a failed save means, and more.
        recipe: What decides the result, from `strategy.recipe(dataset)`. It is recorded in every
            checkpoint, and a checkpoint of another recipe is refused (`RecipeMismatchError`); in a
            group all processes need one recipe. Without one the manager warns if a strategy
            computes in this process; `{}` says that there is none. Versions and settings of the
            imported frameworks are recorded in any case, and compared at the first `save` after a
            resume.
        allow: Fields of the recipe that may differ, which is then a warning. The environment
            variable PERDURE_ALLOW names more of them.
        processes: The group, `strategy.processes`; None for a single process.

    Attributes:
        preemption: The flag that a signal sets, for loops that need more than `reached_preemption`.
        journal: A line for each recorded step, which resumed runs are compared with.

    Raises:
        ArgumentError: An argument has a value that cannot be used.
        NotARunError: `directory` holds something else.
        ClusterError: The framework knows of other processes, and `processes` is not given.
        StoreError: `mirror` cannot be a mirror of `directory`.
    """

    @takes_tensorflow_order
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
        checkpoint: Checkpoint | None = None,
        step_counter: Any = None,
    ) -> None:
        require_kind("options", options, ManagerOptions, optional=True)
        self._options = options = options or ManagerOptions()
        rules, clock = options.retention, options.clock
        max_to_keep = integer("max_to_keep", max_to_keep, optional=True)
        interval = integer("save_interval_steps", save_interval_steps)
        self._processes = group = group_of(processes)
        recipe_check = RecipeCheck(recipe, allow, group)
        refuse_checkpoint_name(directory)
        run = Run(directory, create=True, codec=options.codec, clock=clock)
        self._mirror = None if mirror is None else Mirror(run, mirror, max_to_keep, rules, clock)
        super().__init__(run, rules, recipe_check.given)
        if processes is None:
            require_group(run.where)
        self._interval = SaveInterval(interval, run)
        require_kind("checkpoint", checkpoint, Checkpoint, optional=True)
        self._checkpoint, self._step_counter = checkpoint, step_counter
        if checkpoint is not None:
            managers[checkpoint] = weakref.ref(self)
        self._entered = False
        describe = partial(describe_newest, run)
        self.preemption = PreemptionFlag(None, describe, signals=options.preemption_signals)
        self.journal = Journal(run, group, options)
        self._saver = saver = Saver(
            run, self._mirror, recipe_check, self.journal, max_to_keep, options
        )
        self._restorer = Restorer(saver)
        # A manager that nobody refers to any more (a notebook cell that is run again) lets the next
        # writer in once its save has ended: the thread that saves refers to the saver.
        self._finalizer = weakref.finalize(saver, abandon, run, self.preemption, os.getpid())
        self._finalizer.atexit = False

    @overload
    def save(
        self, step: int, state: Any, metrics: Metrics = None, *, force: bool = False
    ) -> bool: ...

    @overload
    def save(
        self, checkpoint_number: int | None = None, *, check_interval: bool = True
    ) -> str | None: ...

    @names_forms("save")
    @exclusive
    def save(
        self,
        step: int | None = None,
        state: Any = None,
        metrics: Metrics = None,
        *,
        force: bool = False,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
    ) -> bool | str | None:
        """Save `state` as `step` if it is time, or in any case with `force`; True if it is saved.

        Returns as soon as `state` may change again; the checkpoint is durable once
        `wait_until_finished` or `close` returns. In a group every process calls this at the same
        steps with its own copy of the state.

        A manager that was made for a `Checkpoint` saves that one if no state is given, and returns
        `RUN@STEP` or None as TensorFlow does. The step is then that of `checkpoint_number`, of
        `step_counter` (an integer, or a function that returns one), or the one after the last save;
        `check_interval=False` is `force=True`.

        Args:
            step: An integer from 0, of Python, NumPy or a framework.
            state: A tree of values that a checkpoint takes.
            metrics: Numbers that are recorded with it, for retention and for people.
            force: Save even if `should_save(step)` is False.

        Raises:
            ArgumentError: `step` is no step, a metric is no number, or there is no state.
            HistoryError: `step` is at or below the newest committed step, and has other bits or was
                never saved: the checkpoints of a run are one line of steps (see `rollback`).
            MismatchError: The first save could not be restored into the target of this manager's
                restore (without one: into the state itself). A later save warns once.
            UnsupportedLeafError: A value in `state` has no exact form.
            LockedError: Another process writes there (in a group: at the next call).
            StateError: In a group, the copies of the state differ (at the next call), except in
                `PerRank`.
            SaveError: The save before this one failed (a warning under `on_error="continue"`).
            JournalMismatchError: A repeated step has other bits than before (`journal_every`).
            RecipeMismatchError: The first call after a resume: a framework has other settings than
                before.
        """
        if state is None and self._checkpoint is not None:
            given = step if checkpoint_number is None else checkpoint_number
            step = self._interval.step_of(given, self._step_counter)
            is_saved = self._save(step, self._checkpoint, metrics, force or not check_interval)
            return name_at_step(self.directory, step) if is_saved else None
        step = step_number(step)
        require_state(state)
        return self._save(step, state, metrics, force)

    def _save(self, step: int, state: Any, metrics: Any, force: bool) -> bool:
        beat("step", step)
        self._saver.recipe.check_settings(self.directory)
        state = LazyWalk(state)
        self._saver.begin_save(state)
        self.journal.record_saved(step, state, metrics)
        if not force and not self.should_save(step):
            return False
        beat("save", step)
        self._saver.settle_before_next()
        if self._processes.count > 1:
            self._interval.record(step)  # also if this process raises: all decide alike at the next
        try:
            is_saved = self._saver.save(step, state, metrics)
        finally:
            beat("step", step)
        if is_saved:
            self._interval.record(step)
        return is_saved

    def wait_until_finished(self, *, mirror: bool = False) -> bool:
        """Wait for the save under way, which is durable then. Raises what it raised.

        With `mirror` also wait, for at most `ManagerOptions.mirror_wait` seconds, until the mirror
        has what was saved, and warn if it has not. Returns whether the save was committed: under
        `on_error="continue"` a failed save is a warning.
        """
        self.require_process("wait_until_finished")
        self.require_no_call("wait_until_finished")
        with self._turn:
            is_committed = self._saver.settle(wait=True)
            if mirror and self._mirror is not None and self._processes.is_chief:
                self._mirror.wait(self._options.mirror_wait)
                self._saver.warn_of_mirror()
            return is_committed

    @names_forms("restore")
    def restore(
        self,
        step: int | str | None = None,
        like: Any = None,
        *,
        leaves: str | Iterable[str] | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
    ) -> Restored:
        """Restore `step`, or the newest good checkpoint, into `like`.

        Containers and arrays come back new; modules, optimizers, PyTorch parameters and other
        stateful objects in `like` are changed in place. Newer checkpoints that are damaged are
        skipped with a warning, and moved to quarantine if or once this manager holds the writer's
        lock. In a group every process passes the same arguments, apart from `like`, and restores
        the same step.

        Only a restore of everything, bit for bit, resumes the run (`restored.report.is_exact`): it
        alone restores the random generators (`ManagerOptions.save_random_state`). After another
        one, the first save warns.

        Args:
            step: A step, a name such as `RUN@best`, or None for the newest.
            like: The template; without one the state is nested dicts of NumPy arrays.
            leaves: Paths of leaves or of branches (`"model"` for all below it), or patterns (`*` in
                a part of a path, `**` for any parts: `"model/**/kernel"`): only these are read and
                replaced. They may lie inside a PyTorch module; optimizers and other objects are
                restored as a whole.
            strict: With False, what the checkpoint lacks, or has with another shape or dtype, keeps
                the value of `like`, and what `like` lacks is ignored: one warning, and the report.
                Optimizers and other objects that do not fit are kept as a whole.
            rename: Paths of `like` by paths of the checkpoint, of leaves or of branches.
            cast: Convert leaves of which only the dtype differs, floats to floats, and integers to
                integers that hold the values.

        Raises:
            StepNotFoundError: There is no such checkpoint (or LeafNotFoundError: it has no such
                leaf).
            CorruptionError: The `step` that was asked for is damaged.
            UnreachableError: A checkpoint cannot be read now. This is no damage, and no older one
                is used.
            MismatchError: `like` does not fit; or one of `leaves` or `rename` has no match, or
                names a part of an object that is restored as a whole.
        """
        request = RestoreRequest.of(like, leaves, strict, rename, cast)
        restored = self._restore(step, like, request)
        if restored is None:
            if like is not None and request.is_strict:
                self._restorer.expect(like)  # a program may catch the error and start from it
            raise StepNotFoundError(
                f"{self.directory}: expected a checkpoint, found none. Save one first, or use "
                f"`restore_or_initialize`."
            )
        beat("compile", restored.step)
        return restored

    def resume_members(
        self, members: Mapping[str, Any], step: int | None = None, names: Iterable[str] = ()
    ) -> None:
        """For a loop that restores the rest of its state itself: begin with these members.

        With a `step`, its members `names` are restored, and what no `state_dict` has (attributes,
        `requires_grad`, gradients that no step has used). Call it before the first step in any case:
        what the program changes from then on is saved. Raises what `restore` raises.
        """
        self._restorer.observe(members)
        if step is not None:
            like = dict(members)
            request = RestoreRequest.of(like, names, True, None, False)._replace(resumes=True)
            self._restore(step, like, request)

    @names_forms("restore_or_initialize")
    def restore_or_initialize(self, init: Any = None, *, start_over: bool = False) -> Restored:
        """The newest good checkpoint, or a fresh state at step 0 if there is none.

        The manager becomes the writer, so that a second writer, or a disk that cannot be written
        to, is reported before the first step. To read beside a trainer, use `restore`.

        Args:
            init: The fresh state, or a function without arguments that makes it; the template of
                the restore. A module is a state, though it can be called: only a function, a
                method, a class, a `functools.partial` or a callable that cannot be saved is called.
                None, and a function that returns None as TensorFlow's `init_fn`: the `Checkpoint`
                that the manager was made for. The function is called before a restore, too.
            start_over: Begin, with what the mirror has or else at step 0, although the run has had
                checkpoints, which were all set aside or are gone.

        Raises:
            ArgumentError: A function returned None, and the manager was made for no `Checkpoint`.
            HistoryError: The run has had checkpoints, or `perdure run` knows of one, and it has
                none now, without `start_over`. `perdure run` then does not restart the program.
            CorruptionError, UnreachableError, MismatchError: As `restore`.
            LockedError: Another process writes there.
            SaveError: The directory cannot be written to (a warning under `on_error="continue"`).
        """
        self.require_open("restore_or_initialize")
        with reporting_refusal():
            self._begin_training(start_over)
        init = self._checkpoint if init is None else init
        # Not in turn with other calls: it is the caller's function.
        make = partial(call_init, init, self._checkpoint)
        like = together(GroupCall(self._processes, "init"), make) if makes_state(init) else init
        restored = self._restore(None, like, RestoreRequest())
        if restored is None:
            if not start_over:
                with reporting_refusal():
                    together(self._processes, self._require_new, by_chief=NoneType)
            else:
                committed(self.directory, None)
            self._restorer.begin(like)
            self._interval.record(0)
            restored = Restored(like, 0)
        else:
            committed(self.directory, restored.step)
            if self._processes.is_chief and (note := self._run.later_saves(restored.step)):
                warn_caller(note)
        beat("compile", restored.step)
        return restored

    def _require_new(self) -> None:
        self._run.require_new()
        if self._mirror is not None:
            self._mirror.require_new()

    @exclusive
    def reached_preemption(self, step: int) -> bool:
        """Whether a process of the group got SIGTERM; every process must ask at the same steps. The
        first call takes it over (`ManagerOptions.preemption_signals`): the loop has to end the
        process, by `save_and_exit`."""
        beat("step", step_number(step))
        self.preemption.install()
        return GroupCall(self._processes, "reached_preemption").any(self.preemption.raised)

    def save_and_exit(self, step: int, state: Any, metrics: Metrics = None) -> NoReturn:
        """Save `state` as `step`, wait until it is durable, and exit with status 75.

        A `TerminationConfig` may name another way to exit. Raises what the save raised, whatever
        `on_error` says: status 75 means that the state is saved.
        """
        self._save_and_exit(step, state, metrics)
        self.exit_preempted()

    @exclusive
    def _save_and_exit(self, step: int, state: Any, metrics: Metrics) -> None:
        step = step_number(step)
        beat("save", step)
        self._saver.recipe.check_settings(self.directory)
        self._saver.settle_before_next()
        state = LazyWalk(state)
        self.journal.record_saved(step, state, metrics)
        self._saver.submit(step, state, metrics, preempted=True)
        self._saver.wait()

    def exit_preempted(self) -> NoReturn:
        """Exit with status 75 once what was saved before is durable, without another save."""
        self._exit_preempted()
        self.preemption.exit_process()  # not in turn: `exit_fn` is the caller's

    @exclusive
    def _exit_preempted(self) -> None:
        self._saver.settle(wait=True)
        self.journal.finish(None)
        self._closed = True
        if self._mirror is not None:
            left = self.preemption.seconds_left()
            self._mirror.close(EXIT_WAIT_S if left is None else max(0.0, left - 1))
            for note in self._mirror.notes():
                # No warning: it could become an error, and the exit status another one.
                logging.getLogger(__name__).warning("%s", note)
        self._saver.release()
        GroupCall(self._processes, "exit_preempted").barrier()

    def close(self) -> None:
        """Wait for the save under way, and let another writer in. Raises what the save raised.

        In a group every process calls this. Then it waits for the mirror,
        `ManagerOptions.mirror_wait` seconds at most, and warns with the steps that the mirror
        lacks. May be called twice; in a forked child it does nothing. With a lost worker it does
        not wait.
        """
        self._close(sys.exception())

    def _close(self, raising: BaseException | None) -> None:
        if self.in_forked_child:
            return
        self.require_no_call("close")
        beat("end")
        is_lost = isinstance(raising, WorkerLostError)
        with self._turn:
            self._closed = True
            try:
                if not (is_lost and self._saver.background.busy):
                    self._saver.settle(wait=True)
                self.journal.finish(raising)
            finally:
                self.preemption.remove()
                try:
                    if self._mirror is not None:
                        self._mirror.close(0.0 if is_lost else self._options.mirror_wait)
                finally:
                    # A save is under way if the wait was interrupted or left out.
                    if not self._saver.background.busy:
                        self._saver.release()
                self._saver.warn_of_mirror()

    def __enter__(self) -> CheckpointManager:
        self.require_open("__enter__")
        if self._entered:
            raise StoreError(
                f"{self.directory}: expected one `with` for a manager, found a second one. The first "
                f"closes the manager at its end; make another manager after it."
            )
        self._entered = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._processes.count == 1 and not self._closed and self.preemption.explains(error):
            self._exit_preempted()
            newest = describe_newest(self._run)
            report(f"a data worker ended by the signal that preempts the run. {newest}")
            self.preemption.exit_process()
        self._close(error)

    @property
    def latest_checkpoint(self) -> str | None:
        """As in `ManagedDirectory`. If there is none, the program begins with its `Checkpoint`."""
        newest = super().latest_checkpoint
        if newest is None and self._checkpoint is not None and self._saver.restore_check.is_new:
            self._restorer.expect(self._checkpoint)
        return newest

    @exclusive
    def _begin_training(self, start_over: bool) -> None:
        if start_over:
            self._run.session.starts_over = True
        self._saver.begin_writing()

    @exclusive
    def _restore(
        self, step: int | str | None, like: Any, request: RestoreRequest
    ) -> Restored | None:
        beat("restore")
        self._saver.settle(wait=True)
        self._saver.release_memory()
        self._saver.forget_highest()
        # After the wait for the save: a name is then the same step in every process.
        number = step_or_name(step, self._run)
        # One pause for all of it, because each one ends in a collection.
        with kept_members(like), gc_paused():
            restored = self._restorer.restore(number, like, request)
        if restored is not None and restored.report.is_exact:
            self._interval.record(restored.step)
        return restored
