"""`Run`: one run directory, its checkpoints, and the one writer that it may have.

Readers take no lock and never change anything; the first change takes the writer's lock and keeps it
until `close`. The work is done by `loading` (reading), `writer_session` (the lock), `committer`,
`garbage_collection`, `rollback` and `damage`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from perdure.errors import (
    CorruptionError,
    HistoryError,
    StepNotFoundError,
    StoreError,
)
from perdure.store.codec import encoder
from perdure.store.committer import Committer
from perdure.store.damage import DamageHandler
from perdure.store.directory import Directory
from perdure.store.failures import reading
from perdure.store.format import pin_name, time_text
from perdure.store.garbage_collection import (
    Collected,
    CollectPlan,
    PruneRequest,
    execute_collect,
    plan_collect,
    stopped,
)
from perdure.store.leaf import Leaf
from perdure.store.loading import (
    Loaded,
    ReadRequest,
    list_pins,
    list_steps,
    load_step,
    read_manifest,
)
from perdure.store.manifest import Manifest, RecipeValue
from perdure.store.names import newest_step, quarantined
from perdure.store.rollback import AsideCheckpoint, moving, roll_back, rolled_back, undo_rollback
from perdure.store.run_events import Pinned, Removed, Saved
from perdure.store.run_log import RunLog
from perdure.store.run_marker import read_marker
from perdure.store.storage import Storage
from perdure.store.urls import open_storage
from perdure.store.view import OutdatedPlanError, View
from perdure.store.writer_session import WriterSession
from perdure.text import quoted


class Run:
    """A run directory at a path, at the URL of an object store, or on any `Storage`.

    It belongs to the process that made it: in a forked child every change raises `LockedError`. A
    closed `Run` may be used again; its next change takes the lock again.

    Args:
        where: Path, URL or `Storage` of the run directory.
        create: Accept an empty or missing directory, which becomes a run directory at the first save.
        repair: Accept a directory with checkpoints whose marker is missing or damaged; its first
            writer writes the marker again.
        codec: The codec of chunks that this object will write ("shuffle-zstd"), or None. Readers find
            it out from the manifest.
        clock: Returns the seconds since 1970 that manifests and notes state.

    Raises:
        NotARunError: `where` holds no run directory, and neither `create` nor `repair` accepts it.
        CorruptionError: The marker is missing or damaged beside checkpoints, without `repair`.
        FormatVersionError: A newer perdure wrote the directory.
        StoreError: The codec is not known, or its library is missing.
        UnreachableError: The storage cannot be read.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage,
        *,
        create: bool = False,
        repair: bool = False,
        codec: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.encode = encoder(codec)
        self.storage: Storage = open_storage(where)
        # No reference to this object, so that it can be freed at once.
        self._now = now = lambda: time_text(clock())
        with reading(self.where):
            marker = read_marker(self.storage, create=create, repair=repair)
        self.log = RunLog(self.storage, marker and marker.run, marker and marker.made_from)
        """The log of the run. Only its writer may append to it."""
        self.directory = Directory(self.storage, self.log)
        self.damage = DamageHandler(self.directory, self.encode, now)
        self.notes = self.damage.notes
        """What saves found for the user. Whoever shows these texts empties the list."""
        self.session = WriterSession(self.directory, self.damage, now, marked=marker is not None)
        self.committer = Committer(self.session, self.encode)

    @property
    def is_run_directory(self) -> bool:
        """Whether the directory has its marker, which the first writer writes."""
        return self.session.marked

    @property
    def is_writer(self) -> bool:
        """Whether this object holds the writer's lock."""
        return self.session.holds_lock

    @property
    def where(self) -> str:
        """Path or URL of the run directory."""
        return self.storage.where

    def steps(self) -> list[int]:
        """Committed steps, oldest first; `UnreachableError` if they cannot be listed."""
        return list_steps(self.storage)

    def newest_step(self) -> int | None:
        """The newest committed step, None before the first. Raises as `steps`, and costs less."""
        with reading(f"{self.where}: the list of its checkpoints"):
            return newest_step(self.storage)

    def manifest(self, step: int) -> Manifest:
        """The checked manifest of `step`.

        Raises:
            StepNotFoundError, CorruptionError, UnreachableError: It is absent, damaged, not readable.
            HistoryError: It is that of another run.
        """
        return read_manifest(self.storage, step, self.log.run)

    def load(self, step: int, needs: ReadRequest | Callable[[str], bool] | None = None) -> Loaded:
        """Read and verify one checkpoint.

        Later saves of this object write the chunks of a pack again in which this finds damage.

        Args:
            step: A committed step.
            needs: What to read, or a function that is given the path of a leaf and returns whether to
                read it; all leaves are read by default.

        Raises:
            StepNotFoundError: There is no such checkpoint, or none of its leaves is wanted.
            CorruptionError: The manifest or a chunk is damaged; the text names leaf, pack and offset.
            UnreachableError: A file cannot be read.
        """
        request = needs if isinstance(needs, ReadRequest) else ReadRequest(needs)
        return load_step(self.directory, step, request)

    def begin_writing(self) -> None:
        """Become the writer, as every change does by itself. May be called often.

        The first writer makes the directory a run directory; each one clears what a crashed writer
        left half written.

        Raises:
            LockedError: There is another writer, or this process is a forked child.
            SaveError: The run directory cannot be written to.
        """
        self.session.begin()

    def take_lock(self) -> None:
        """Take the writer's lock and nothing more. May be called often.

        A training loop can call this and leave `begin_writing`, which takes longer, to the background.

        Raises:
            LockedError: There is another writer, or this process is a forked child.
            SaveError: The lock cannot be taken for another reason.
        """
        self.session.take_lock()

    def save(
        self,
        step: int,
        leaves: Mapping[str, Leaf],
        recipe: Mapping[str, RecipeValue] | None = None,
        metrics: Mapping[str, float] | None = None,
        process_leaves: Mapping[str, Leaf] | None = None,
    ) -> Manifest:
        """Commit one checkpoint; it survives power loss on return.

        Chunks that one of the newest 64 readable checkpoints holds are not written again. Saving a
        step again with equal bits succeeds: the checkpoint gets the `metrics` that it lacks, and these
        `process_leaves`.

        Args:
            step: From 0 to `MAX_STEP`, above the newest committed step.
            leaves: The leaves of the state by path.
            recipe: Fields that describe how the state is made.
            metrics: Numbers by name; NaN and infinities are stored as null.
            process_leaves: Leaves that belong to one process each, such as its random generators, and
                are no part of the fingerprint.

        Returns:
            The manifest that is committed.

        Raises:
            StepExistsError: The step is committed with other bits.
            HistoryError: The step is below the newest committed one, and not there.
            LockedError: Another process writes here.
            SaveError: Anything else failed. Every earlier checkpoint is unchanged.
            StoreError: `step` is out of range.
        """
        own = process_leaves or {}
        with self.committer.prepare(step, leaves, own) as save:
            written = None
            if not save.is_committed:
                written = self.committer.write_pack(step, leaves, own)
            return self.committer.commit(save, written, recipe, metrics)

    def delete(self, steps: Iterable[int], *, log_removal: bool = False) -> list[int]:
        """Delete checkpoints and the packs that only they needed.

        Args:
            steps: The steps to delete; those that are not committed are ignored.
            log_removal: Write into the log, if the disk has room for it, that each was removed on
                purpose, so that a mirror that still holds it does not bring it back.

        Returns:
            The steps that were deleted, oldest first.

        Raises:
            StoreError: A step is pinned; nothing was deleted.
            CorruptionError: The log or a folder is damaged, or another run's; nothing was deleted.
            PruneError: Deleting stopped in the middle.
        """
        self.begin_writing()
        plan = self.plan(PruneRequest(frozenset(steps)))
        if plan.is_frozen:
            raise CorruptionError(f"{self.where}: {plan.held_back}")
        for step in plan.steps if log_removal else ():
            with suppress(CorruptionError, StepNotFoundError, OSError):
                fingerprint = self.manifest(step).fingerprint
                self.log.append(Removed(step=step, fingerprint=fingerprint))
        self.execute(plan)
        return list(plan.steps)

    def adopt_run_id(self, source: Run) -> None:
        """Let its first writer make it a copy of the run `source`, with the same id.

        Raises `HistoryError` if it is a run already, and another one.
        """
        if not self.is_run_directory:
            self.log.run = source.log.run
        elif source.log.run not in (None, self.log.run):
            raise HistoryError(
                f"{self.where}: expected an empty directory or a copy of {source.where}, which is run "
                f"{source.log.run}; found run {self.log.run}. Nothing was changed. Name another one."
            )

    def finish(self) -> None:
        """Note that the run is made: from now on a training may begin from its checkpoints."""
        self.session.finish()

    def require_new(self) -> None:
        """Raise `HistoryError` if the run, which has no checkpoint, had one, or is not made whole."""
        with reading(self.where):
            why = View(self.storage, self.log).refusal_to_begin()
        if why is not None:
            raise HistoryError(why)

    def later_saves(self, step: int) -> str | None:
        """A warning if the run seems to have lost checkpoints after `step`, its newest one."""
        with suppress(OSError, StoreError):
            return View(self.storage, self.log).later_saves(step)
        return None

    def require_finished(self) -> None:
        """Raise `HistoryError` if a command that makes the run has not ended: a checkpoint is newer."""
        if self.log.unfinished is not None and not self.session.starts_over:
            self.require_new()

    def require_not_lost(self) -> None:
        """Raise `HistoryError` if no checkpoint is there because they were lost or set aside."""
        with reading(self.where):
            why = View(self.storage, self.log).nothing_left()
        if why is not None:
            raise HistoryError(f"{why} `perdure verify {quoted(self.where)}` says more.")

    def contents(self, *, whole: bool = True) -> View:
        """A view of what is there now. Every manifest that changed is read, and no pack.

        Args:
            whole: Decode every manifest and list every pack. Without it the writer relies on the packs
                that it knows.

        Raises:
            PruneError: The run directory cannot be listed.
        """
        if not self.is_writer:
            self.directory.forget()
        return self.directory.contents(whole=whole)

    def plan(self, request: PruneRequest) -> CollectPlan:
        """What a request would delete and move. Changes nothing and takes no lock."""
        return plan_collect(self.contents(), request)

    def execute(self, plan: CollectPlan, view: View | None = None) -> Collected:
        """Carry out a plan; every checkpoint that stays is readable at any instant.

        What is deleted is decided again from the manifests as they are now, under the lock, unless the
        writer has made the plan from the view `view` just now.

        Raises:
            OutdatedPlanError: The run directory changed since the plan was made; nothing was deleted.
            PruneError: An operation failed in the middle; plan again.
        """
        self.begin_writing()
        if view is None:
            view = self.directory.contents()
            if plan_collect(view, plan.request) != plan:
                self.directory.changed()
                raise OutdatedPlanError(
                    f"{self.where}: changed since the plan was made; nothing was deleted. Plan again."
                )
        if plan.steps and not set(view.steps) - set(plan.steps):
            with suppress(OSError):
                self.log.append(Saved())  # whoever starts again does so on purpose
        try:
            done = execute_collect(self.storage, self.log, view, plan)
        except OSError as error:
            self.directory.forget()
            raise stopped(self.where, error) from error
        packs = {*plan.packs, *plan.orphans, *plan.compact}.difference(done.left)
        self.directory.removed(plan.steps, packs)
        if plan.quarantined or done.replaced:
            self.directory.changed()
        for error in done.damaged:
            self.directory.distrust(error)
        return done

    def pin(self, step: int) -> None:
        """Protect a checkpoint from every deletion until `unpin`; durable on return.

        A step that is pinned already stays so. Raises `StepNotFoundError` for one that is not there.
        """
        self.begin_writing()
        self.manifest(step)
        if step not in self.pinned():
            self.storage.create(pin_name(step), 0).commit()
            self._log_pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Let a checkpoint be deleted again. A step that is not pinned is no error."""
        self.begin_writing()
        self.storage.delete(pin_name(step))
        if step in self.log.view.pinned:
            self._log_pin(step, pinned=False)

    def _log_pin(self, step: int, *, pinned: bool) -> None:
        """Say in the log, too, what the folder of pins says; a damaged log gets no more lines."""
        if self.log.check().problem is None:
            self.log.append(Pinned(step=step, pinned=pinned))

    def pinned(self) -> frozenset[int]:
        """The pinned steps."""
        return list_pins(self.storage, self.log.view)

    def rollback(self, step: int, *, dry_run: bool = False) -> list[int]:
        """Go back to the checkpoint of `step`: every newer one is set aside, the newest first.

        They move to quarantine, where no prune deletes them unless it is asked to. Everything is
        durable on return. After a crash the call can be repeated.

        Args:
            step: A committed step. Its checkpoint is read and verified first.
            dry_run: Check everything, take no lock and change nothing.

        Returns:
            The steps that were (or, in a dry run, would be) set aside, oldest first.

        Raises:
            StepNotFoundError: `step` is not committed.
            CorruptionError: The checkpoint of `step` is damaged. Nothing was moved.
            HistoryError: A newer step is pinned. Nothing was moved.
            LockedError: Another writer is at work.
            SaveError: An operation failed in the middle; repeat the call.
        """
        if not dry_run:
            self.begin_writing()
        with moving(self.directory, "the rollback", dry_run=dry_run):
            return roll_back(self.storage, self.log, step, when=self._now(), dry_run=dry_run)

    def undo_rollback(self, *, dry_run: bool = False) -> list[int]:
        """Bring back the checkpoints that rollbacks set aside, as long as nothing else was saved.

        A checkpoint returns only after the one that it followed. So two rollbacks in a row are both
        undone, and a line that was left for another one stays where it is. Everything is durable on
        return. After a crash the call can be repeated.

        Args:
            dry_run: Check everything, take no lock and change nothing.

        Returns:
            The steps that were (or, in a dry run, would be) brought back, oldest first; empty if
            nothing is set aside.

        Raises:
            HistoryError: What is set aside does not continue the newest checkpoint.
            LockedError: Another writer is at work.
            SaveError: An operation failed in the middle; repeat the call.
        """
        if not dry_run:
            self.begin_writing()
        with moving(self.directory, "undoing the rollback", dry_run=dry_run):
            return undo_rollback(self.storage, self.log, dry_run=dry_run)

    def rolled_back(self) -> list[AsideCheckpoint]:
        """The checkpoints that rollbacks set aside, by their names in quarantine.

        Raises `UnreachableError` if the storage does not answer.
        """
        with reading(self.where):
            return rolled_back(View(self.storage, self.log))

    def quarantine(self, step: int, reason: str) -> str:
        """Move a damaged manifest to quarantine; the log has the reason. Durable on return.

        Its packs stay: parts of them may be good, and other checkpoints may read from them. Returns the
        new name; raises `SaveError` if the manifest cannot be moved.
        """
        self.begin_writing()
        return self.damage.quarantine(step, reason)

    def quarantined(self) -> list[str]:
        """Names of what is in quarantine: manifests, and packs that a repair set aside."""
        return quarantined(self.storage)

    def close(self) -> None:
        """Give the writer's lock back. Raises `SaveError` if the storage refuses."""
        self.session.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
