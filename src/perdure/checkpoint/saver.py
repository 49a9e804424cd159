"""`Saver`: snapshots in the call of the user; commits and retention in the background.

Invariant: one save at a time is under way, and its error is raised by the next call, never swallowed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import NoneType
from typing import Any

from perdure.checkpoint.arguments import Metrics, metric_numbers
from perdure.checkpoint.group_call import GroupCall, save_channel, together
from perdure.checkpoint.group_save import SaveCache, as_save_error, decline_save, save_in_group
from perdure.checkpoint.journal import Journal
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.checkpoint.mirror import Mirror
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.checkpoint.recipe import RecipeCheck
from perdure.checkpoint.retention import RetentionRules
from perdure.errors import (
    LockedError,
    MismatchError,
    PruneError,
    SaveError,
    StateError,
    StoreError,
    UnsupportedLeafError,
    warn_caller,
)
from perdure.runtime.heartbeats import committed, lost, saved_before, saving
from perdure.runtime.process_group import Processes
from perdure.state import snapshot
from perdure.state.extra_members import ExtraMembers
from perdure.state.per_rank import RankContext, rank_context
from perdure.state.process_random import finish_callbacks
from perdure.state.restore_check import RestoreCheck
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.state.walk import Walk
from perdure.store import Leaf, Run
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaves, containers_of
from perdure.store.pack_part import GroupState
from perdure.store.pools import submit
from perdure.text import few


class Saver:
    """The run directory of a manager and the saves into it; the restorer shares its parts. A thread
    that saves refers to this object and not to the manager."""

    def __init__(
        self,
        run: Run,
        mirror: Mirror | None,
        recipe: RecipeCheck,
        journal: Journal,
        max_to_keep: int | None,
        options: ManagerOptions,
    ) -> None:
        self.run, self.mirror, self.recipe, self.journal = run, mirror, recipe, journal
        self.processes = recipe.processes
        self.restore_check = RestoreCheck()
        self.extras = ExtraMembers(save_random_state=options.save_random_state)
        self._rules = RetentionRules(run, max_to_keep, options.retention)
        self._options = options
        self.background = Background()
        self._buffer = SnapshotBuffer()
        self._save_cache = SaveCache()
        self._channel: Processes | None = None
        # The error of the save before this one, which not every process may have.
        self._failed: Exception | None = None
        self._notes: list[str] = []
        self._warned: set[str] = set()
        self._has_begun = self._has_looked = False
        # A save above this step is new; None until the processes have agreed on it.
        self._highest: int | None = None

    def update_mirror(self) -> None:
        """Bring the mirror up to date, in the background; the chief does it."""
        if self.mirror is not None and self.processes.is_chief:
            self.mirror.notify()

    def warn_of_mirror(self) -> None:
        """Warn about what went wrong in the mirror."""
        for note in self.mirror.notes() if self.mirror is not None else ():
            warn_caller(note)

    def begin_writing(self) -> None:
        """Become the writer, in the chief, with the same outcome in every process; once. A
        collective. A directory that cannot be written to is a warning under `on_error="continue"`.
        """
        if self._has_begun:
            return
        self.recipe.warn_if_missing(self.run.where)
        try:
            call = "restore_or_initialize"
            together(self.processes, self._begin_writing, by_chief=NoneType, call=call)
        except LockedError as error:
            raise LockedError(f"{error} To read beside it, call `restore`.") from None
        except SaveError as error:
            self._tolerate(error)
        self._has_begun = True

    def _begin_writing(self) -> None:
        """Become the writer, unless the run would begin again by accident: then write nothing."""
        run, mirror = self.run, self.mirror
        step = None if run.session.starts_over else saved_before().get(run.where)
        is_gone = step is not None and run.newest_step() is None
        if is_gone and (mirror is None or not mirror.readable_steps()[1]):
            run.require_new()  # which may know more
            raise lost(run.where, step)
        run.begin_writing()

    def begin_save(self, state: Any) -> None:
        """What every call of `save` begins with, even if it is not due: errors, the writer's lock,
        and the first look of the extra members at the state."""
        if self.processes.count == 1:  # in a group only where all of them do: in a due save
            self.settle(wait=False)
            if not self._has_begun:
                try:  # the lock alone, which costs less; the save in the background does the rest
                    self.run.take_lock()
                except SaveError as error:
                    self._tolerate(error)
                self._has_begun = True
        if not self._has_looked:
            self._has_looked = True
            with suppress(StateError), rank_context(self.processes.index, self.processes.count):
                self.extras.observe(state)  # a save that is due raises the error

    def save(self, step: int, state: Any, metrics: Metrics) -> bool:
        """Start to save `state`; True if it is under way, False after a warning about its error. A
        save at or below the newest step is waited for, because it may be refused."""
        try:
            if self.processes.count == 1:
                self.run.take_lock()
            self._agree_on_channel()
            is_new = self._is_new(step)
            self.submit(step, state, metrics)
            if not is_new:
                if not self.settle(wait=True):
                    return False
                self._highest = None  # a failed save may have been the highest
        except SaveError as error:
            self._tolerate(error)
            return False
        self._raise_failed()
        return True

    def submit(self, step: int, state: Any, metrics: Metrics, *, preempted: bool = False) -> None:
        """Take the snapshot, and commit it in the background. A preempted run only warns about a
        state that could not be restored."""
        self._agree_on_channel()
        self.recipe.warn_if_missing(self.run.where)
        self.recipe.check_group("save")
        self.journal.require_agreement()
        try:
            numbers = metric_numbers(metrics)
            finish_callbacks()
            index, count = self.processes.index, self.processes.count
            is_first = self.restore_check.is_first
            rank_of = rank_context(index, count, keeps_shards=count == 1, compares_copies=is_first)
            with rank_of as rank, gc_paused():
                walk = Walk.of(state)
                where = f"{self.run.where}: step {step}"
                self.restore_check.check_used(where, walk, step)
                if is_first and count > 2:
                    self._warn_of_buckets(where, walk)
                leaves = snapshot(walk, self._buffer, self.restore_check.baseline)
                _refuse_own_shards(rank, leaves)
                try:
                    self.restore_check.check_first(where, walk, leaves)
                except MismatchError as error:
                    if not preempted:
                        raise
                    warn_caller(str(error))  # better than to lose the state
                own = self.extras.capture(walk, leaves, index)
        except BaseException as error:
            if self.processes.count > 1:  # the others are saving, and must not wait for this one
                assert self._channel is not None
                self.background.submit(partial(decline_save, self.run, self._channel, step, error))
                shared = as_save_error(error, self.run.where, step)
                if shared is not error and isinstance(error, Exception):
                    raise shared from error
            raise
        self.background.submit(partial(self.save_snapshot, step, leaves, numbers, rank, own))

    def _warn_of_buckets(self, where: str, walk: Walk) -> None:
        if "torch" not in sys.modules:
            return
        from perdure.state.torch_buckets import not_arranged

        if found := not_arranged(walk.targets):
            warn_caller(
                f"{where}: {few(found)}: expected a DistributedDataParallel that "
                f"`restore_or_initialize` got before the first step, found another one. It arranges "
                f"its buckets after that step, and the first step after a resume will add the "
                f"gradients in another order. Give it to `restore_or_initialize`, in the state."
            )

    def wait(self) -> None:
        """Wait for the save under way; raises what it raised, whatever `on_error` says."""
        self.background.wait()
        self._raise_failed()

    def settle_before_next(self) -> None:
        """`settle`, before the next save begins. In a group an error is raised once that has begun:
        others have not raised it, and begin the next save."""
        try:
            self.settle(wait=True)
        except Exception as error:
            if self.processes.count == 1:
                raise
            self._failed = error

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def settle(self, *, wait: bool) -> bool:
        """Raise the error of the last save, or warn and return False under `on_error="continue"`.
        Without `wait` only one that has ended is looked at."""
        committed = True
        try:
            if wait or not self.background.busy:
                self.background.wait()
        except (SaveError, PruneError) as error:
            self._tolerate(error)
            committed = isinstance(error, PruneError)  # pruning starts after the commit
        if not self.background.busy:
            notes, self._notes = self._notes, []
            for note in notes:
                if note not in self._warned:
                    self._warned.add(note)
                    warn_caller(note)
        self.warn_of_mirror()
        return committed

    def forget_highest(self) -> None:
        """The newest step may change: the next save asks for it again."""
        self._highest = None
        self.journal.forget()

    def release_memory(self) -> None:
        """Free the last snapshot, before a restore that needs as much. No save may be under way."""
        self._buffer.release()

    def release(self) -> None:
        """Give back the memory of snapshots, the journal and the lock of the run."""
        self.journal.close()
        self._buffer.release()
        self.run.close()

    def save_snapshot(
        self,
        step: int,
        leaves: dict[str, Leaf],
        metrics: Mapping[str, float],
        rank: RankContext,
        process_leaves: Mapping[str, Leaf],
    ) -> None:
        """Commit a snapshot and apply the retention; durable on return."""
        saving(step)
        run, recipe, is_alone = self.run, self.recipe.recorded, self.processes.count == 1
        if note := self.restore_check.changed(f"{run.where}: step {step}", leaves):
            self._notes.append(note)
        try:
            if is_alone:
                self._notes += self._rules.record()
                run.save(step, leaves, recipe, metrics, process_leaves=process_leaves)
            else:
                ranked = Leaves()
                if rank.members:
                    containers = containers_of(leaves)
                    for path in filter(rank.owns, [*leaves]):
                        ranked[path] = leaves.pop(path)
                    for path in filter(rank.owns, [*containers]):
                        ranked.containers[path] = containers.pop(path)
                state = GroupState(step, leaves, ranked, process_leaves)
                assert self._channel is not None
                with save_in_group(run, self._channel, state, recipe, metrics, self._save_cache):
                    if self.processes.is_chief:
                        self._prune(step, metrics)
            committed(run.where, step)
        finally:
            saving(None)
            self._buffer.note_donations()
            self._notes += run.notes
            run.notes.clear()
        if is_alone:
            self._prune(step, metrics)

    def _prune(self, step: int, metrics: Mapping[str, float]) -> None:
        rules, mirror = self._rules, self.mirror
        try:
            self._notes += rules.check(step, metrics)
            if mirror is not None:
                mirror.retention = rules.retention
            self._notes += rules.apply(step, None if mirror is None else mirror.copying)
        finally:
            self.update_mirror()

    def _agree_on_channel(self) -> None:
        """Find a channel for the saves of this manager, at its first save in a group. A collective."""
        if self.processes.count > 1 and self._channel is None:
            self._channel = save_channel(self.processes, self.run.where)

    def _is_new(self, step: int) -> bool:
        """Whether `step` is above every committed one, which decides only whether the call waits
        for the save. The first call, and the first after a restore or a rollback, is a collective.
        """
        if self._highest is None:
            newest = -1
            if self.processes.is_chief:
                with suppress(StoreError):  # the save finds the same, and raises it
                    found = self.run.newest_step()
                    newest = -1 if found is None else found
            call = GroupCall(self.processes, "save")
            self._highest = int(call.agree(b"%d" % newest, lambda sent: sent[0]))
        is_new = step > self._highest
        self._highest = max(step, self._highest)
        return is_new

    def _tolerate(self, error: StoreError) -> None:
        if self._options.on_error == "raise":
            raise error
        warn_caller(f"{error} Training continues; the next save tries again.")


def _refuse_own_shards(rank: RankContext, leaves: Mapping[str, Leaf]) -> None:
    for path, leaf in leaves.items() if rank.members and rank.count > 1 else ():
        if leaf.shards is not None and rank.owns(path):
            raise UnsupportedLeafError(
                f"{path}: an array that is sharded over the processes is one member of all of them; "
                f"expected it outside of PerRank."
            )


class Background:
    """Runs one job at a time on a thread of its own."""

    def __init__(self) -> None:
        # One thread for all saves: the loop would wait for a new one to start. It is not a daemon, so
        # that Python waits for the save under way before it exits.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="perdure-save")
        self._job: Future[None] | None = None
        self._pid = os.getpid()
        atexit.register(_log_at_exit, weakref.ref(self))  # runs after the wait for threads

    @property
    def busy(self) -> bool:
        job = self._job  # read once: another thread may take it away
        # A forked child has no thread that would ever finish the job.
        return job is not None and not job.done() and os.getpid() == self._pid

    def submit(self, job: Callable[[], None]) -> None:
        """Start `job` after the one before it, whose error it raises."""
        self.wait()
        self._job = submit(self._pool, job)

    def wait(self) -> None:
        """Wait for the job under way; raises its error, once."""
        if (job := self._job) is None:
            return
        try:
            job.result()
        finally:
            # An interrupted wait (Ctrl-C) leaves the job under way: it still reads the snapshot.
            if job.done():
                self._job = None

    def join(self) -> None:
        """Wait for the job under way; its error stays for the next call."""
        if self.busy and (job := self._job) is not None:
            job.exception()

    def log_error(self) -> None:
        """Log the error of a finished job that no call has raised."""
        job = self._job
        if job is not None and job.done() and os.getpid() == self._pid:
            self._job = None
            if error := job.exception():
                logging.getLogger(__name__).error("The last save before the end failed: %s", error)

    def __del__(self) -> None:
        self.log_error()


def _log_at_exit(background: weakref.ref[Background]) -> None:
    if (alive := background()) is not None:
        alive.log_error()


def abandon(run: Run, preemption: PreemptionFlag, pid: int) -> None:
    """Close a manager that nobody refers to any more, after its save has ended."""
    if os.getpid() == pid:  # else the lock is the parent's
        preemption.abandon()
        run.close()
