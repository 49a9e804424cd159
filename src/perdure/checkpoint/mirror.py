"""`Mirror`: a second run directory that receives every committed checkpoint in the background.

Invariant: checkpoints reach it through its own commit protocol, in rising steps, and nothing that
fails there fails or delays a save here.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from perdure.checkpoint.retention import Retention, prune_after_save
from perdure.errors import (
    CorruptionError,
    HistoryError,
    NotARunError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store import Run, Storage
from perdure.store.copy import copy_checkpoint, refuse_same_place
from perdure.store.run_marker import read_marker
from perdure.store.urls import open_storage
from perdure.text import quoted

EXIT_WAIT_S = 20.0
"""Seconds that a preempted or unclosed run waits for the mirror when nobody said how many are left."""

_FAILED = "failed: "


class _StoppedError(Exception):
    """The mirror was closed in the middle of a copy. Nothing of that copy was committed."""


class Mirror:
    """Copies the checkpoints of `source` into the run directory `where`, and reads them back.

    From the first `notify` on one thread writes, under the mirror's own lock. It keeps what a
    manager with `max_to_keep` and `retention` keeps, and deletes nothing as long as `retention` is
    None (not known).
    """

    def __init__(
        self,
        source: Run,
        where: str | os.PathLike[str] | Storage,
        max_to_keep: int | None,
        retention: Retention | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.storage = open_storage(where)
        self.copying: int | None = None
        """The step that is copied now. The source's retention leaves it alone, or a mirror that is
        slower than the saves would never finish a copy."""
        self._source = source
        self._max_to_keep, self.retention, self._clock = max_to_keep, retention, clock
        self._target: Run | None = None
        self._damaged: dict[int, str] = {}
        self._unreadable: set[int] = set()
        self._unpinned: set[int] = set()
        self._changed = threading.Condition()
        self._reached = -1
        self._notes: list[str] = []
        self._warned: set[str] = set()
        self._wanted = self._busy = self._failed = self._stopped = False
        self._pid = os.getpid()
        refuse_same_place(source.storage, self.storage)
        try:
            self._is_run()
        except UnreachableError as error:
            if not source.is_run_directory:
                raise self.holds_neither(None, error) from error
            self._note(_cause(error), f"{self.name} does not answer: {error}")
        this: weakref.ref[Mirror] = weakref.ref(self)
        source.session.before_new = lambda: (mirror := this()) and mirror.begin()
        atexit.register(_report_at_exit, this)

    @property
    def name(self) -> str:
        """The mirror in messages."""
        return f"the mirror {self.storage.where}"

    @property
    def in_forked_child(self) -> bool:
        """Whether another process made this object."""
        return os.getpid() != self._pid

    def begin(self) -> None:
        """Name the run in an empty mirror before its source is there, so that whoever begins again
        on another machine before the first copy continues the same run.
        """
        source = self._source
        try:
            if source.is_run_directory or self._is_run():
                return
            source.log.run = secrets.token_hex(8)
            with Run(self.storage, create=True, clock=self._clock) as target:
                target.adopt_run_id(source)
                target.begin_writing()
        except HistoryError:
            raise
        except StoreError as error:
            self._note(_cause(error), f"{self.name} cannot be written to: {error}")

    def require_new(self) -> None:
        """Raise `HistoryError` if the mirror, which has no checkpoint to restore, had one."""
        if self._is_run():
            Run(self.storage).require_new()

    def notify(self) -> None:
        """Copy the checkpoints that the mirror lacks, in the background; returns at once."""
        with self._changed:
            if self._stopped:
                return
            self._wanted = True
            if self._busy:
                return
            self._busy = True
        # A daemon: a storage that hangs must not keep a finished program alive. It ends when the mirror
        # is up to date, so that a manager that nobody closed can be collected with its locks.
        thread = threading.Thread(target=self._work, name="perdure-mirror", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads while Python ends
            self._work()

    def unpin(self, step: int) -> None:
        """Unpin `step` in the mirror too, also if the source deletes it meanwhile."""
        self._unpinned.add(step)
        self.notify()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is copied or an attempt failed; True if copied."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._wanted or self._busy), seconds)
            return not (self._wanted or self._busy or self._failed)

    def close(self, seconds: float) -> None:
        """Retry a copy that failed, wait at most `seconds`, and give the mirror's lock back; not in
        a forked child. What the mirror lacks then is among `notes`."""
        if self.in_forked_child:
            return
        if self._failed:
            self.notify()
        copied = False
        try:
            copied = self.wait(seconds)
        finally:
            with self._changed:
                self._stopped = True
                if not self._busy:
                    self._release()
        # From memory: to ask a mirror that hangs would take longer than the wait is allowed to.
        missing = [step for step in self._source.steps() if step > self._reached]
        if missing and not copied:
            self._note(
                "missing",
                f"{self.name} lacks {_named(missing)} of {self._source.where} after a wait of at most "
                f"{seconds:g} s. The next run copies them; `perdure copy {quoted(self._source.where)} "
                f"{quoted(self.storage.where)}` does it now.",
            )

    def notes(self) -> list[str]:
        """The warnings since the last call; each cause once until a copy succeeds again."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def catch_up(self) -> None:
        """Copy what is newer than the mirror's newest, oldest first, in this thread; raises the
        first error. After each copy the retention is applied."""
        try:
            if self._target is None:
                self._target = Run(self.storage, create=True, clock=self._clock)
                self._target.adopt_run_id(self._source)
            target = self._target
            target.begin_writing()
            self._tidy(target)
            while (step := self._next(target)) is not None:
                self.copying = step
                try:
                    copy_checkpoint(self._source, step, target, before=self._require_running)
                except StepNotFoundError:
                    if step in self._source.steps():
                        raise
                    continue  # retention deleted it, so there is a newer one
                except CorruptionError as error:
                    self._unreadable.add(step)
                    self._note(
                        f"damaged {step}", f"step {step} is not copied to {self.name}: {error}"
                    )
                    continue
                finally:
                    self.copying = None
                self._tidy(target)
                if self._max_to_keep is not None and (rules := self.retention) is not None:
                    for note in prune_after_save(target, self._max_to_keep, rules, step, None):
                        self._note(note, f"{self.name}: {note}")
            if target.log.unfinished is not None:
                target.finish()  # it has all that the source has
            self._compare(target)
        except BaseException:
            self._release()
            raise

    def _require_running(self) -> None:
        if self._stopped:
            raise _StoppedError

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._stopped or not self._wanted:
                    self._busy = self._wanted = False
                    if self._stopped:
                        self._release()
                    self._changed.notify_all()
                    return
                self._wanted = False
            failed = True
            try:
                self.catch_up()
                failed = False
                # A failure after this is a new one; a history that differs stays the same cause.
                self._warned -= {cause for cause in self._warned if cause.startswith(_FAILED)}
            except _StoppedError:
                pass  # `close` reports what is missing
            except Exception as error:  # noqa: BLE001 (a mirror never fails the training)
                self._note(
                    _cause(error),
                    f"{self.name} could not be brought up to date: {error} Training continues; the "
                    f"copy is tried again after the next save and when the manager is closed.",
                )
            self._failed = failed

    def _release(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _next(self, target: Run) -> int | None:
        self._reached = max(target.steps(), default=-1)
        steps = (step for step in self._source.steps() if step > self._reached)
        return next((step for step in steps if step not in self._unreadable), None)

    def _tidy(self, target: Run) -> None:
        """Set damaged steps aside; repeat the pins and deletions of the source in the mirror."""
        for step, reason in list(self._damaged.items()):
            if step in target.steps():
                target.quarantine(step, reason)
            del self._damaged[step]
        steps, source_steps = set(target.steps()), set(self._source.steps())
        pinned, source_pinned = target.pinned(), self._source.pinned()
        for step in source_pinned & steps - pinned:
            target.pin(step)
        unpinned = set(self._unpinned)
        # A source that has lost a step has lost its pin, too: that says nothing.
        for step in pinned & (source_steps | unpinned) - source_pinned:
            target.unpin(step)
        removed = set(self._removed_in_source(target))
        for step in removed & pinned:
            target.unpin(step)
        if removed:
            target.delete(removed)
        self._unpinned -= unpinned

    def _removed_in_source(self, target: Run) -> list[int]:
        """The steps of the mirror whose checkpoints were rolled back or deleted in the source."""
        source = self._source
        if source.log.view.problem is not None:
            return []
        removed = set(source.log.view.removed.copy())
        for rolled_back in source.rolled_back():
            removed.add((rolled_back.manifest.step, rolled_back.manifest.fingerprint))
        steps = []
        for step in sorted({step for step, _ in removed} & set(target.steps())):
            fingerprint = _fingerprint(target, step)
            if (step, fingerprint) in removed and fingerprint != _fingerprint(source, step):
                steps.append(step)
        return steps

    def _compare(self, target: Run) -> None:
        """Warn when the mirror has another history, so that nothing here can be added to it."""
        steps, mirrored = self._source.steps(), target.steps()
        if not steps or not mirrored or steps[-1] in self._unreadable:
            return
        newest, mirror_newest = steps[-1], mirrored[-1]
        if newest > mirror_newest:
            return  # committed just now, and copied next
        if newest not in mirrored:
            self._note(
                "history",
                f"{self.name} holds step {mirror_newest}, and the newest checkpoint in "
                f"{self._source.where} is step {newest}: the two have different histories. Steps are "
                f"copied again once they are newer than {mirror_newest}. If {mirror_newest} is not "
                f"wanted any more, delete it in the mirror.",
            )
        elif (note := disagreement(self._source, target, newest)) is not None:
            self._note("other bits", note)

    def _note(self, cause: str, text: str) -> None:
        with self._changed:
            if cause not in self._warned:
                self._warned.add(cause)
                self._notes.append(text)

    def readable_steps(self) -> tuple[Run | None, list[int], str | None]:
        """The mirror as a run (None while it is empty), the steps that a restore may take from it,
        and what to warn about. Raises `UnreachableError` if it does not answer."""
        if not self._is_run():
            return None, [], None
        target = Run(self.storage)
        if (origin := target.log.unfinished) is not None:
            return (
                target,
                [],
                f"{self.name} was to be a copy of {origin}, which did not end: not used.",
            )
        steps = target.steps()
        if not (removed := self._removed_in_source(target)):
            return target, steps, None
        note = (
            f"{self.name} still holds {_named(removed)}, which a rollback set aside or a call deleted "
            f"here; it is not used, and is deleted there after the next save."
        )
        return target, [step for step in steps if step not in removed], note

    def quarantine(self, step: int, reason: str) -> None:
        """Move `step` of the mirror, which is damaged, to its quarantine at the next `catch_up`."""
        self._damaged[step] = reason

    def holds_neither(self, step: int | None, error: StoreError) -> UnreachableError:
        """The error of a restore if the source lacks `step` and the mirror does not answer."""
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        return UnreachableError(
            f"{self._source.where}: expected {wanted}, found none, and {self.name} does not answer: "
            f"{error} Nothing was changed. Try again when it answers, or leave `mirror` out to do "
            f"without it."
        )

    def _is_run(self) -> bool:
        """Whether the mirror holds anything yet; HistoryError if it is another run.

        A new source continues it.
        """
        try:
            marker = read_marker(self.storage, create=True)
        except NotARunError as error:
            if isinstance(error.__cause__, OSError):
                raise UnreachableError(str(error)) from error
            raise
        if marker is None:
            return False
        source = self._source
        if not source.is_run_directory:
            source.log.run = marker.run
        elif source.log.run != marker.run:
            raise HistoryError(
                f"{self.name}: expected run {source.log.run} of {source.where}, or an empty place, "
                f"found run {marker.run}. Nothing was changed. Name another mirror; or, if that is the "
                f"run to continue, an empty run directory."
            )
        return True


def _named(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def disagreement(one: Run, other: Run, step: int) -> str | None:
    """A warning if two runs hold different states at `step`; None if they do not."""
    try:
        first, second = (run.manifest(step).fingerprint for run in (one, other))
    except StoreError:
        return None  # gone or damaged, which a restore reports
    if first == second:
        return None
    return (
        f"step {step} is not the same in {one.where} (fingerprint {first[:16]}) and in its mirror "
        f"{other.where} ({second[:16]}): the two have different histories. Nothing is overwritten."
    )


def _fingerprint(run: Run, step: int) -> str | None:
    with suppress(StepNotFoundError, CorruptionError):
        return run.manifest(step).fingerprint
    return None


def _cause(error: BaseException) -> str:
    """The same text for errors that come from one cause, such as a refused connection."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{_FAILED}{type(error).__name__} {getattr(error, 'errno', None)}"


def _report_at_exit(mirror: weakref.ref[Mirror]) -> None:
    # `notes` takes a lock that another thread may have held when this process was forked.
    if (alive := mirror()) is not None and not alive.in_forked_child:
        alive.close(EXIT_WAIT_S)
        for note in alive.notes():
            logging.getLogger(__name__).error("%s", note)
