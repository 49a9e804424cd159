"""`BackgroundSaver`: snapshots in the call of the user; commits and retention in the background.

Invariant: one save at a time is under way, and its error is raised by the next call, never swallowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import NoneType
from typing import Any, SupportsFloat

from perdure.checkpoint.arguments import metric_numbers
from perdure.checkpoint.background import Background
from perdure.checkpoint.caller_warning import warn_caller
from perdure.checkpoint.grace_period import GracePeriod
from perdure.checkpoint.group_call import GroupCall, save_channel, together
from perdure.checkpoint.group_save import (
    GroupState,
    SaveCache,
    as_save_error,
    decline_save,
    save_in_group,
)
from perdure.checkpoint.managed_run import ManagedRun
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.checkpoint.pruning import prune_after_save
from perdure.checkpoint.restore_check import RestoreCheck
from perdure.checkpoint.retention_rules import RetentionRules
from perdure.errors import (
    LockedError,
    MismatchError,
    PruneError,
    SaveError,
    StateError,
    StoreError,
    UnsupportedLeafError,
)
from perdure.runtime.heartbeats import committed, saving
from perdure.runtime.process_group import Processes
from perdure.state import snapshot
from perdure.state.extra_members import ExtraMembers
from perdure.state.per_rank import RankContext, rank_context
from perdure.state.process_random import finish_callbacks
from perdure.state.shards import copies_compared
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.state.walk import Walk
from perdure.store import Leaf
from perdure.store.gc_pause import gc_paused
from perdure.store.pack_part import LocalLeaves


class BackgroundSaver:
    """Saves states into a run directory, for a manager."""

    def __init__(
        self,
        managed: ManagedRun,
        max_to_keep: int | None,
        options: ManagerOptions,
        grace: GracePeriod,
    ) -> None:
        self.restore_check = RestoreCheck()
        self.extras = ExtraMembers(save_random_state=options.save_random_state)
        self._managed = managed
        self._journal = managed.journal
        self._run = managed.run
        self._processes = managed.processes
        self._rules = RetentionRules(managed.run, max_to_keep, options.retention)
        self._options = options
        self._grace = grace
        self._background = Background()
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

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._background.busy

    def begin_writing(self) -> None:
        """Become the writer, in the chief, with the same outcome in every process; once.

        So a loop finds out before its first step that another process writes, or that the directory
        cannot be written to. The latter is a warning under `on_error="continue"`. A collective.
        """
        if self._has_begun:
            return
        self._managed.recipe.warn_if_missing(self._run.where)
        try:
            together(
                self._processes,
                self._run.begin_writing,
                by_chief=NoneType,
                call="restore_or_initialize",
            )
        except LockedError as error:
            raise LockedError(f"{error} To read beside it, call `restore`.") from None
        except SaveError as error:
            self._tolerate(error)
        self._has_begun = True

    def begin_save(self, state: Any) -> None:
        """What every call of `save` begins with, even if it is not due.

        The first one shows the state to the extra members, so that the first that is due sees what has
        changed since.
        """
        if self._processes.count == 1:  # in a group only where all of them do: in a due save
            self.settle(wait=False)
            self._take_lock()
        if not self._has_looked:
            self._has_looked = True
            with suppress(StateError), rank_context(self._processes.index, self._processes.count):
                self.extras.see(state)  # a save that is due raises the error

    def _take_lock(self) -> None:
        """Take the writer's lock alone, which costs less, in the first `save` even if it is not due.

        The rest of `begin_writing` is left to the background. Not for a group.
        """
        if self._has_begun:
            return
        try:
            self._run.take_lock()
        except SaveError as error:
            self._tolerate(error)
        self._has_begun = True

    def save(self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None) -> bool:
        """Start to save `state`; True if it is under way, False after a warning about its error.

        A save at or below the newest step is waited for, because it may be refused.
        """
        try:
            if self._processes.count == 1:
                self._run.take_lock()
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

    def submit(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, SupportsFloat] | None,
        *,
        preempted: bool = False,
    ) -> None:
        """Take the snapshot, and commit it in the background.

        A preempted run warns about a state that could not be restored; otherwise that is an error.
        """
        self._agree_on_channel()
        self._managed.recipe.warn_if_missing(self._run.where)
        self._managed.recipe.check_group("save")
        self._journal.require_agreement()
        try:
            numbers = metric_numbers({} if metrics is None else metrics)
            finish_callbacks()
            index, count = self._processes.index, self._processes.count
            is_first = self.restore_check.is_first
            rank_of = rank_context(index, count, keeps_shards=count == 1)
            with rank_of as rank, gc_paused(), copies_compared(is_first):
                walk = Walk.of(state)
                leaves = snapshot(walk, self._buffer, self.restore_check.fresh)
                _refuse_own_shards(rank, leaves)
                self._check_restorable(step, walk, leaves, preempted)
                own = self.extras.take(walk, leaves, index)
        except BaseException as error:
            if self._processes.count > 1:  # the others are saving, and must not wait for this one
                self._background.submit(partial(self._decline, step, error))
                shared = as_save_error(error, self._run.where, step)
                if shared is not error and isinstance(error, Exception):
                    raise shared from error
            raise
        job = partial(self.save_snapshot, step, leaves, numbers, rank, own)
        self._background.submit(self._grace.timed(job))

    def wait(self) -> None:
        """Wait for the save under way; raises what it raised, whatever `on_error` says."""
        self._background.wait()
        self._raise_failed()

    def join(self) -> None:
        """Wait for the save under way; its error stays for the next call."""
        self._background.join()

    def settle_before_next(self) -> None:
        """`settle`, before the next save begins. In a group an error is raised once that has begun.

        A process whose state could not be read has raised the error at once and begins the next save,
        so that the others begin it, too.
        """
        try:
            self.settle(wait=True)
        except Exception as error:
            if self._processes.count == 1:
                raise
            self._failed = error

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def settle(self, *, wait: bool) -> bool:
        """Raise the error of the last save, or warn and return False under `on_error="continue"`.

        Args:
            wait: Wait for the save under way; otherwise only look at one that has ended.
        """
        committed = True
        try:
            if wait:
                self._background.wait()
            else:
                self._background.check()
        except (SaveError, PruneError) as error:
            self._tolerate(error)
            committed = isinstance(error, PruneError)  # pruning starts after the commit
        if not self._background.busy:
            notes, self._notes = self._notes, []
            for note in notes:
                if note not in self._warned:
                    self._warned.add(note)
                    warn_caller(note)
        self._managed.warn_of_mirror()
        return committed

    def forget_highest(self) -> None:
        """The newest step may change: the next save asks for it again."""
        self._highest = None
        self._journal.forget()

    def release(self) -> None:
        """Give back the memory of snapshots, the journal and the lock of the run."""
        self._journal.close()
        self._buffer.release()
        self._run.close()

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
        if note := self.restore_check.changed(f"{self._run.where}: step {step}", leaves):
            self._notes.append(note)
        try:
            if self._processes.count > 1:
                self._save_in_group(step, leaves, metrics, rank, process_leaves)
                committed(self._run.where, step)
                return
            self._notes += self._rules.record()
            self._run.save(
                step, leaves, self._managed.recipe.recorded, metrics, process_leaves=process_leaves
            )
            committed(self._run.where, step)
        finally:
            saving(None)
            self._buffer.note_donations()
            notes, self._run.notes = self._run.notes, []
            self._notes += notes
        self._prune(step, metrics)

    def _save_in_group(
        self,
        step: int,
        leaves: dict[str, Leaf],
        metrics: Mapping[str, float],
        rank: RankContext,
        process_leaves: Mapping[str, Leaf],
    ) -> None:
        ranked: dict[str, Leaf] = {}
        if rank.members:
            ranked = {path: leaves.pop(path) for path in [*leaves] if rank.owns(path)}
        state = GroupState(step, leaves, LocalLeaves(ranked, process_leaves))
        assert self._channel is not None
        channel = self._channel
        recipe = self._managed.recipe.recorded
        with save_in_group(self._run, channel, state, recipe, metrics, self._save_cache):
            if self._processes.is_chief:
                self._prune(step, metrics)

    def _decline(self, step: int, error: BaseException) -> None:
        assert self._channel is not None
        decline_save(self._run, self._channel, step, error)

    def _agree_on_channel(self) -> None:
        """Find a channel for the saves of this manager, at its first save in a group. A collective."""
        if self._processes.count > 1 and self._channel is None:
            self._channel = save_channel(self._processes, self._run.where)

    def _check_restorable(
        self, step: int, state: Walk, leaves: Mapping[str, Leaf], preempted: bool
    ) -> None:
        where = f"{self._run.where}: step {step}"
        self.restore_check.check_used(where, state, step)
        try:
            self.restore_check.check_first(where, state, leaves)
        except MismatchError as error:
            if not preempted:
                raise
            warn_caller(str(error))  # better than to lose the state

    def _is_new(self, step: int) -> bool:
        """Whether `step` is above every committed one, so that a save of it continues the run.

        The answer only decides whether the call waits for the save, which decides by itself. The first
        call, and the first after a restore or a rollback, is a collective.
        """
        if self._highest is None:
            newest = -1
            if self._processes.is_chief:
                with suppress(StoreError):  # the save finds the same, and raises it
                    found = self._run.newest_step()
                    newest = -1 if found is None else found
            call = GroupCall(self._processes, "save")
            self._highest = int(call.agree(b"%d" % newest, lambda sent: sent[0]))
        is_new = step > self._highest
        self._highest = max(step, self._highest)
        return is_new

    def _prune(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._apply_retention(step, metrics)
        finally:
            self._managed.update_mirror()

    def _apply_retention(self, step: int, metrics: Mapping[str, float]) -> None:
        rules, mirror = self._rules, self._managed.mirror
        self._notes += rules.begin(step) + rules.judge(step, metrics)
        if mirror is not None:
            mirror.retention = rules.retention
        if rules.max_to_keep is None or rules.retention is None:
            return
        in_use = None if mirror is None else mirror.copying
        done = prune_after_save(self._run, rules.max_to_keep, rules.retention, step, in_use)
        self._notes += [f"{self._run.where}: {note}" for note in done]

    def _tolerate(self, error: StoreError) -> None:
        """Raise `error`, or warn if the user wants to continue."""
        if self._options.on_error == "raise":
            raise error
        warn_caller(f"{error} Training continues; the next save tries again.")


def _refuse_own_shards(rank: RankContext, leaves: Mapping[str, Leaf]) -> None:
    """Raise `UnsupportedLeafError` for a sharded array that is wrapped in `PerRank`."""
    for path, leaf in leaves.items() if rank.members and rank.count > 1 else ():
        if leaf.shards is not None and rank.owns(path):
            raise UnsupportedLeafError(
                f"{path}: an array that is sharded over the processes is one member of all of them; "
                f"expected it outside of PerRank."
            )
