"""`Mirror`: a second run directory that receives every committed checkpoint in the background.

Invariant: the mirror is a run directory of its own. Checkpoints reach it one by one through its own
commit protocol, in rising steps, and nothing that fails there fails or delays a save here.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from perdure.checkpoint.pruning import execute_prune, plan_prune
from perdure.checkpoint.retention import Retention
from perdure.errors import (
    CorruptionError,
    NoGoodCheckpointError,
    NotARunError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store import Loaded, Run, Storage
from perdure.store.copy import CopyStoppedError, copy_checkpoint, refuse_same_place
from perdure.store.removal_notes import Removed
from perdure.store.run_marker import is_run_directory
from perdure.store.urls import open_storage

EXIT_WAIT_S = 20.0
"""Seconds that a preempted or unclosed run waits for the mirror when nobody said how many are left."""

_FAILED = "failed: "


class RestoreSource(NamedTuple):
    """The checkpoint that a restore takes, whether the mirror gave it, and what to warn about."""

    loaded: Loaded | None
    mirrored: bool
    notes: list[str]


class Mirror:
    """Copies the checkpoints of `source` into the run directory `where`, and reads them back.

    `max_to_keep` and `retention` are applied to the mirror's own contents. Nothing is written before
    the first `notify`; one thread of its own writes then, under the mirror's own lock. Raises
    `StoreError` for a place that cannot be a mirror; one that does not answer is tried again later.
    """

    def __init__(
        self,
        source: Run,
        where: str | os.PathLike[str] | Storage,
        max_to_keep: int | None,
        retention: Retention,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.storage = open_storage(where)
        self.copying: int | None = None
        """The step that is copied now. The source's retention leaves it alone, or a mirror that is
        slower than the saves would never finish a copy."""
        self._source = source
        self._max_to_keep, self._retention, self._clock = max_to_keep, retention, clock
        self._target: Run | None = None
        self._damaged: dict[int, str] = {}
        self._unreadable: set[int] = set()
        self._deleted: set[int] = set()
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
            self._note(_cause(error), f"{self._name} does not answer: {error}")
        atexit.register(_report_at_exit, weakref.ref(self))

    @property
    def where(self) -> str:
        """Path or URL of the mirror."""
        return self.storage.where

    @property
    def in_forked_child(self) -> bool:
        """Whether another process made this object."""
        return os.getpid() != self._pid

    # ------------------------------------------------------------ writing

    def notify(self) -> None:
        """Copy what the mirror lacks, in the background; returns at once."""
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

    def delete(self, step: int) -> None:
        """Delete `step` in the mirror too; done by the next `catch_up`."""
        with self._changed:
            self._deleted.add(step)
        self.notify()

    def wait(self, seconds: float) -> bool:
        """Wait until everything is copied or an attempt failed, at most so long; True if copied."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._wanted or self._busy), seconds)
            return not (self._wanted or self._busy or self._failed)

    def close(self, seconds: float) -> None:
        """Try once more what failed, wait at most `seconds`, and give the mirror's lock back.

        What is missing in the mirror then is among `notes`. The next run copies it. In a forked child
        this does nothing: the thread that copies, and the locks, are the parent's.
        """
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
        if not copied:
            self._note_missing(seconds)

    def notes(self) -> list[str]:
        """What to warn about since the last call; each cause once until a copy succeeds again."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def catch_up(self) -> None:
        """Bring the mirror up to date, in this thread; raises the first error.

        Copies the checkpoints that are newer than the mirror's newest, oldest first. What the source
        deletes meanwhile is skipped. After each copy the retention is applied to the mirror.
        """
        try:
            target = self._open()
            self._tidy(target)
            while (step := self._next(target)) is not None:
                self.copying = step
                try:
                    copy_checkpoint(self._source, step, target, stopped=lambda: self._stopped)
                except StepNotFoundError:
                    if step in self._source.steps():
                        raise
                    continue  # retention deleted it, so there is a newer one
                except CorruptionError as error:
                    self._unreadable.add(step)
                    self._note(
                        f"damaged {step}", f"step {step} is not copied to {self._name}: {error}"
                    )
                    continue
                finally:
                    self.copying = None
                self._tidy(target)
                self._prune(target, step)
            self._compare(target)
        except BaseException:
            self._release()
            raise

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
            except CopyStoppedError:
                pass  # `close` reports what is missing
            except Exception as error:  # noqa: BLE001 (a mirror never fails the training)
                self._note(
                    _cause(error),
                    f"{self._name} could not be brought up to date: {error} Training continues; the "
                    f"copy is tried again after the next save and when the manager is closed.",
                )
            self._failed = failed

    def _open(self) -> Run:
        if self._target is None:
            self._target = Run(self.storage, create=True, clock=self._clock)
        self._target.begin_writing()
        return self._target

    def _release(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _next(self, target: Run) -> int | None:
        """The oldest step that is newer than everything in the mirror."""
        self._reached = max(target.steps(), default=-1)
        steps = (step for step in self._source.steps() if step > self._reached)
        return next((step for step in steps if step not in self._unreadable), None)

    def _tidy(self, target: Run) -> None:
        """Set aside what a restore found damaged; pin and delete what is pinned and deleted here."""
        for step, why in list(self._damaged.items()):
            if step in target.steps():
                target.quarantine(step, why)
            del self._damaged[step]
        steps, here = set(target.steps()), set(self._source.steps())
        pinned, wanted = target.pinned(), self._source.pinned()
        for step in wanted & steps - pinned:
            target.pin(step)
        for step in pinned & here - wanted:
            target.unpin(step)
        deleted = set(self._deleted)
        notes = self._source.removed()
        aside = set(self._aside(target, notes))
        for step in aside & pinned:
            target.unpin(step)
        if gone := (deleted | aside) & steps:
            target.delete(gone)
        with self._changed:
            self._deleted -= deleted
        left = set(target.steps()) if notes else set[int]()
        for note in notes:
            if note.step not in left or note.fingerprint == self._print_here(note.step):
                self._source.forget_removed(note)

    def _aside(self, mirror: Run, removed: Iterable[Removed]) -> list[int]:
        """The steps of the mirror whose checkpoints were rolled back or deleted in the source."""
        prints: dict[int, set[str]] = {}
        for each in self._source.rolled_back():
            prints.setdefault(each.manifest.step, set()).add(each.manifest.fingerprint)
        for note in removed:
            prints.setdefault(note.step, set()).add(note.fingerprint)
        steps = []
        for step in sorted(prints.keys() & set(mirror.steps())):
            with suppress(StepNotFoundError, CorruptionError):
                found = mirror.manifest(step).fingerprint
                if found in prints[step] and found != self._print_here(step):
                    steps.append(step)
        return steps

    def _print_here(self, step: int) -> str | None:
        with suppress(StepNotFoundError, CorruptionError):
            return self._source.manifest(step).fingerprint
        return None

    def _prune(self, target: Run, step: int) -> None:
        if self._max_to_keep is not None:
            plan = plan_prune(target, self._max_to_keep, self._retention, saved=step)
            if plan.store.held_back:
                self._note("held back", f"{self._name}: packs stay: {plan.store.held_back}")
            if not plan.store.empty:
                execute_prune(target, plan)

    def _compare(self, target: Run) -> None:
        """Warn when the mirror has another history, so that nothing here can be added to it."""
        here, there = self._source.steps(), target.steps()
        if not here or not there or here[-1] in self._unreadable:
            return
        if here[-1] not in there:
            self._note(
                "history",
                f"{self._name} holds step {there[-1]}, and the newest checkpoint in "
                f"{self._source.where} is step {here[-1]}: the two have different histories. Steps are "
                f"copied again once they are newer than {there[-1]}. If {there[-1]} is not wanted any "
                f"more, delete it in the mirror.",
            )
        elif (why := disagreement(self._source, target, here[-1])) is not None:
            self._note("other bits", why)

    def _note_missing(self, seconds: float) -> None:
        # From memory: to ask a mirror that hangs would take longer than the wait is allowed to.
        if missing := [step for step in self._source.steps() if step > self._reached]:
            self._note(
                "missing",
                f"{self._name} lacks step{'s' if len(missing) > 1 else ''} "
                f"{', '.join(map(str, missing))} of {self._source.where} after a wait of at most "
                f"{seconds:g} s. The next run copies them; `perdure copy {self._source.where} "
                f"{self.where}` does it now.",
            )

    @property
    def _name(self) -> str:
        return f"the mirror {self.where}"

    def _note(self, cause: str, text: str) -> None:
        with self._changed:
            if cause not in self._warned:
                self._warned.add(cause)
                self._notes.append(text)

    # ------------------------------------------------------------ reading

    def load(
        self,
        step: int | None,
        wanted: Callable[[str], bool] | None = None,
        unreadable: Mapping[int, str] | None = None,
    ) -> RestoreSource:
        """`step`, or the newest good checkpoint of the source and the mirror; all verified.

        Only leaves whose path `wanted` accepts are read. `unreadable` holds steps that are not to be
        tried if `step` is None, with the reasons.

        Of two good checkpoints with the same step the source's is taken. Raises what `Run.load` and
        `Run.load_newest` raise; and `UnreachableError` when the source holds no checkpoint and the
        mirror does not answer, because a start from scratch could throw a run away.
        """
        here, notes = self._source, []
        mirror = None
        try:
            mirror = Run(self.storage) if self._is_run() else None
            there = mirror.steps() if mirror else []
            if mirror and (aside := self._aside(mirror, here.removed())):
                there = [step for step in there if step not in aside]
                notes.append(
                    f"{self._name} still holds step{'s' if len(aside) > 1 else ''} "
                    f"{', '.join(map(str, aside))}, which a rollback set aside or a call "
                    f"deleted here; it is not used, and is deleted there after the next save."
                )
        except UnreachableError as error:
            if not (here.steps() if step is None else step in here.steps()):
                raise self._neither(step, error) from error
            there = []
            notes.append(f"{self._name} does not answer, so only {here.where} is used: {error}")
        if mirror is None or not there:
            if step is None:
                return RestoreSource(here.load_newest(wanted, unreadable), False, notes)
            return RestoreSource(here.load(step, wanted), False, notes)
        if step is not None:
            return self._first(mirror, [step], there, notes, wanted, {})
        steps = here.steps()
        if shared := set(steps) & set(there):
            why = disagreement(here, mirror, max(shared))
            notes += [why] if why else []
        try:
            skipped = dict(unreadable or {})
            order = sorted({*steps, *there} - skipped.keys(), reverse=True)
            return self._first(mirror, order, there, notes, wanted, skipped)
        except StepNotFoundError:
            if here.steps() == steps and set(there) <= set(mirror.steps()):
                raise
            return self.load(
                None, wanted, unreadable
            )  # a prune deleted them meanwhile: there are newer ones

    def _first(
        self,
        mirror: Run,
        steps: Iterable[int],
        there: list[int],
        notes: list[str],
        wanted: Callable[[str], bool] | None,
        skipped: dict[int, str],
    ) -> RestoreSource:
        """The first of `steps` that one of the two can give; adds the damaged ones to `skipped`."""
        here = self._source
        wrong: list[str] = []
        failed: StoreError | None = None
        for step in steps:
            try:
                return RestoreSource(_skipping(here.load(step, wanted), skipped), False, notes)
            except StepNotFoundError as error:
                failed = failed or error
                why = f"{here.where} does not hold it."
            except CorruptionError as error:
                skipped[step] = str(error)
                why = f"it is damaged in {here.where}."
                wrong.append(f"  {error}")
            except StoreError as error:  # no damage, so that an older step would be wrong
                if step not in there:
                    raise
                failed, why = error, str(error)
            if step not in there:
                continue
            try:
                loaded = mirror.load(step, wanted)
            except StepNotFoundError:
                continue
            except UnreachableError as error:
                failed = self._neither(step, error)
                notes.append(f"step {step} is only in {self._name}, which does not answer: {error}")
                continue
            except CorruptionError as error:
                self._damaged[step] = str(error)
                wrong.append(f"  {error}")
                notes.append(f"step {step} of {self._name} is damaged: {error}")
                continue
            notes.append(f"step {step} is restored from {self._name}: {why}")
            return RestoreSource(_skipping(loaded, skipped), True, notes)
        if failed is not None and not (wrong and isinstance(failed, StepNotFoundError)):
            raise failed
        reasons = "\n".join(wrong)
        raise NoGoodCheckpointError(
            f"{here.where} and {self._name}: expected a readable checkpoint, found {len(wrong)} "
            f"damaged:\n{reasons}\nNothing was changed. `perdure verify` lists what is damaged in each."
        )

    def _is_run(self) -> bool:
        """Whether the mirror holds anything yet; raises `UnreachableError` when that is not known."""
        try:
            return is_run_directory(self.storage, create=True)
        except NotARunError as error:
            if isinstance(error.__cause__, OSError):
                raise UnreachableError(str(error)) from error
            raise

    def _neither(self, step: int | None, error: StoreError) -> UnreachableError:
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        return UnreachableError(
            f"{self._source.where}: expected {wanted}, found none, and {self._name} does not answer: "
            f"{error} Nothing was changed. Try again when it answers, or leave `mirror` out to do "
            f"without it."
        )


def disagreement(one: Run, other: Run, step: int) -> str | None:
    """What to say when two runs hold different states at `step`; None when they do not."""
    try:
        prints = [run.manifest(step).fingerprint for run in (one, other)]
    except StoreError:
        return None  # gone or damaged: whoever reads the checkpoint reports that
    if prints[0] == prints[1]:
        return None
    return (
        f"step {step} is not the same in {one.where} (fingerprint {prints[0][:16]}) and in its mirror "
        f"{other.where} ({prints[1][:16]}): the two have different histories. Nothing is overwritten."
    )


def _cause(error: BaseException) -> str:
    """The same text for errors that come from one cause, such as a refused connection."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{_FAILED}{type(error).__name__} {getattr(error, 'errno', None)}"


def _skipping(loaded: Loaded, skipped: dict[int, str]) -> Loaded:
    return replace(loaded, skipped=tuple(skipped.items()))


def _report_at_exit(mirror: weakref.ref[Mirror]) -> None:
    """Finish, within a bound, the mirror of a manager that nobody closed; log what is missing."""
    # `notes` takes a lock that another thread may have held when this process was forked.
    if (alive := mirror()) is not None and not alive.in_forked_child:
        alive.close(EXIT_WAIT_S)
        for note in alive.notes():
            logging.getLogger(__name__).error("%s", note)
