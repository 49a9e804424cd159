"""Going back to an older checkpoint: newer ones move to quarantine, and the log says how they return.

Invariant: after a crash at any operation the newest committed checkpoint is one of the line that was
rolled back, every other one of that line is either committed or in quarantine, and the same call can be
repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from perdure.errors import CorruptionError, HistoryError, SaveError, UnreachableError
from perdure.store.directory import Directory
from perdure.store.format import MANIFESTS, manifest_name, steps_text
from perdure.store.journal_lines import ReturningLines
from perdure.store.loading import list_pins, list_steps, read_manifest
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest, encode_manifest
from perdure.store.names import committed_steps, moved_aside, quarantined, step_aside
from perdure.store.reader import verify_leaves
from perdure.store.run_events import Cut, Done, Returned, RolledBack, RolledBackCheckpoint
from perdure.store.run_log import Aside, LogView, RunLog, free_name, line_references
from perdure.store.run_marker import require_folders
from perdure.store.storage import Storage
from perdure.store.view import View
from perdure.text import few, quoted


class AsideCheckpoint(NamedTuple):
    """A checkpoint that a rollback set aside: its name in quarantine, its manifest, and why."""

    name: str
    manifest: Manifest
    why: Aside

    @property
    def place(self) -> tuple[int, str]:
        """Step and fingerprint."""
        return self.manifest.step, self.manifest.fingerprint


def rolled_back(view: View) -> list[AsideCheckpoint]:
    """The readable checkpoints in quarantine that a rollback put there, by name."""
    log = view.log
    return [
        AsideCheckpoint(name, manifest, log.aside[name])
        for name, manifest in view.quarantined.items()
        if log.is_rolled_back(name)
    ]


def forget_lines(storage: Storage, log: LogView) -> None:
    """Let the checkpoints that rollbacks set aside forget the lines that a repair of the log lost."""
    for name in filter(log.is_rolled_back, quarantined(storage)):
        with suppress(CorruptionError):  # it cannot return in any case
            manifest = decode_aside(storage, name)
            if manifest.log is not None and log.lost({manifest.step: manifest.log}):
                storage.replace(name, encode_manifest(msgspec.structs.replace(manifest, log=None)))


def decode_aside(storage: Storage, name: str) -> Manifest:
    """Read a manifest in quarantine. Raises as `decode_manifest`, or `OSError`."""
    return decode_manifest(storage.read(name), f"{storage.where}/{name}", step_aside(name))


def roll_back(storage: Storage, log: RunLog, step: int, *, when: str, dry_run: bool) -> list[int]:
    """Set every checkpoint newer than `step`, which is verified first, aside; see `Run.rollback`.

    The writer calls this inside `moving`. Returns the newer steps, oldest first.
    """
    steps = list_steps(storage)
    newer = [other for other in steps if other > step]
    try:
        verify_leaves(storage, read_manifest(storage, step, log.run))
    except CorruptionError as error:
        raise CorruptionError(f"{error} Nothing was moved; go back to another step.") from error
    view = log.view
    view.require()
    if pinned := sorted(list_pins(storage, view) & set(newer)):
        raise HistoryError(
            f"{storage.where}: steps {steps_text(pinned)} are newer than {step} and pinned; nothing "
            f"was moved. Unpin them first (`manager.unpin`)."
        )
    if not dry_run:
        if newer:
            log.append(_rolled_back(storage, log, steps, step, when))
            _move(storage, log)
        elif view.journal.steps_after(step) is not None:
            log.append(Cut(step=step))
    return newer


def _rolled_back(
    storage: Storage, log: RunLog, steps: Iterable[int], target: int, when: str
) -> RolledBack:
    """The line by which all `steps` above `target` move to quarantine: under which name, and after
    which checkpoint each comes."""
    taken = {*quarantined(storage)}
    predecessor: tuple[int, str] | None = None
    moved: list[RolledBackCheckpoint] = []
    for step in steps:
        if step > target:
            name = free_name(taken, f"{step:012d}", ".json")
            moved.append(RolledBackCheckpoint(step, name, predecessor))
        with suppress(CorruptionError):
            predecessor = step, read_manifest(storage, step, log.run).fingerprint
    return RolledBack(step=target, checkpoints=tuple(moved), time=when)


def _move(storage: Storage, log: RunLog) -> None:
    """Move the checkpoints of which the last line says so, if it is one of a rollback or an undo.

    To quarantine the newest first, back from there the oldest first, each durable before the next.
    """
    committed, aside = committed_steps(storage), quarantined(storage)
    match log.view.moving:
        case RolledBack(step=target, checkpoints=moved):
            for checkpoint in reversed(moved):
                if checkpoint.step in committed and checkpoint.to not in aside:
                    storage.move(manifest_name(checkpoint.step), checkpoint.to)
            if log.view.journal.steps_after(target) is not None:
                log.append(Cut(step=target))
        case Returned(checkpoints=names):
            for name in filter(aside.__contains__, names):
                if (step := step_aside(name)) is not None and step not in committed:
                    storage.move(name, manifest_name(step))
    log.append(Done())


class UndoPlan(NamedTuple):
    """What undoing rollbacks brings back: checkpoints, the oldest first, and lines of the journal.

    `gone` are names of others of that line, which are in quarantine no more.
    """

    newest: Manifest | None
    line: tuple[AsideCheckpoint, ...] = ()
    lines: ReturningLines | None = None
    gone: tuple[str, ...] = ()


def plan_undo(storage: Storage, log: RunLog) -> UndoPlan:
    """What `undo_rollback` would do; `HistoryError` if nothing that is set aside continues the run."""
    steps = list_steps(storage)
    newest = read_manifest(storage, steps[-1], log.run) if steps else None
    view = View(storage, log)
    view.log.require(line_references([newest] if newest else []))
    candidates = rolled_back(view)
    if newest is None and not candidates:
        return UndoPlan(None)
    place = (newest.step, newest.fingerprint) if newest else None
    there = set(filter(view.log.is_rolled_back, quarantined(storage)))
    line, gone = _returning(view.log, candidates, place)
    before = newest.step if newest else -1
    lines = view.log.journal.returning(before, [checkpoint.manifest for checkpoint in line])
    damaged = there.difference(each.name for each in candidates)
    refused = f"{storage.where}: nothing was brought back:"
    if line:
        damaged.intersection_update(gone)
    elif lines is not None:  # these come with checkpoints, of which none may be there any more
        damaged |= {name for name, why in view.log.aside.items() if why.after == place is not None}
        damaged.difference_update(each.name for each in candidates)
    replaced = None if line or lines is None else lines.replaced
    if lines is not None and replaced is not None:
        raise HistoryError(
            f"{refused} the lines of steps {lines.steps[0]} to {lines.steps[1]} were set aside, and "
            f"those of steps {replaced[0]} to {replaced[1]} were recorded since."
        )
    if damaged:
        raise HistoryError(
            f"{refused} {few(sorted(damaged))} is missing, cannot be read, or is not what the "
            f"rollback set aside. Bring it back from a copy, or remove it: the others return without "
            f"it. `perdure verify {quoted(storage.where)}` says more."
        )
    if line or lines is not None:
        return UndoPlan(newest, tuple(line), lines, tuple(gone))
    now = f"the newest checkpoint is {f'step {before}' if newest else 'gone'}"
    if candidates:
        places = {candidate.place for candidate in candidates}
        starts = {candidate.why.after for candidate in candidates} - places
        known = sorted({after[0] for after in starts if after is not None})
        follows = f"step {steps_text(known)}" if known else "a checkpoint that is not there"
        raise HistoryError(
            f"{refused} {now}, and what rollbacks set aside continues {follows}. Go back there first "
            f"(`perdure rollback {quoted(storage.where)}@STEP`)."
        )
    if aside := view.log.journal.steps_aside():
        raise HistoryError(
            f"{refused} {now}, and the lines of steps "
            f"{', '.join(f'{first} to {last}' for first, last in aside)}, which are set aside, do not "
            f"continue it."
        )
    pruned = {step for step, _ in view.log.removed}
    if missing := [name for name in gone if step_aside(name) not in pruned]:
        raise HistoryError(
            f"{refused} {few(missing)}, which a rollback set aside, is not there any more. Bring it "
            f"back from a copy of the run, under that name."
        )
    names = [name for name in moved_aside(storage) if step_aside(name) is not None]
    if unexplained := view.log.unexplained(names):
        raise HistoryError(
            f"{refused} the lines of the log about {few(unexplained)} were lost before a repair. To "
            f"bring such a checkpoint back, move its file to {MANIFESTS}, under the name "
            f"{manifest_name(0).removeprefix(MANIFESTS)} with the digits of its step."
        )
    return UndoPlan(newest)


def _returning(
    log: LogView, candidates: Collection[AsideCheckpoint], newest: tuple[int, str] | None
) -> tuple[list[AsideCheckpoint], list[str]]:
    """The candidates that continue `newest`, oldest first (of several for a step, the last set aside),
    and the names of the other objects of the same line."""
    following: dict[tuple[int, str] | None, AsideCheckpoint] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.why.line):
        following[candidate.why.after] = candidate
    others = {name: why for name, why in log.aside.items() if log.is_rolled_back(name)}
    for candidate in candidates:
        others.pop(candidate.name, None)
    line, gone = list[AsideCheckpoint](), list[str]()
    while newest is not None:
        if (successor := following.get(newest)) is not None:
            if successor.manifest.step <= newest[0]:
                break  # a file in quarantine that was changed by hand
            line.append(successor)
            newest = successor.place
            continue
        names = [name for name, why in others.items() if why.after == newest]
        if not names:
            break
        # The log says what followed the one that is not there.
        gone.append(names[-1])
        step, line_number = step_aside(names[-1]), others.pop(names[-1]).line
        after = (why.after for why in log.aside.values() if why.line == line_number)
        newest = next((place for place in after if place is not None and place[0] == step), None)
    return line, gone


def undo_rollback(storage: Storage, log: RunLog, *, dry_run: bool) -> list[int]:
    """Bring back what continues the newest checkpoint; returns the steps, oldest first."""
    plan = plan_undo(storage, log)
    if plan.newest and (plan.line or plan.lines) and not dry_run:
        cuts = plan.lines.cuts if plan.lines is not None else ()
        names = tuple(returned.name for returned in plan.line)
        log.append(Returned(step=plan.newest.step, cuts=cuts, checkpoints=names))
        _move(storage, log)
    return [returned.manifest.step for returned in plan.line]


@contextmanager
def moving(directory: Directory, operation: str, *, dry_run: bool) -> Iterator[None]:
    """Finish what an earlier move began, then move; `directory` forgets everything afterwards."""
    storage = directory.storage
    require_folders(storage, directory.log.run)
    try:
        if not dry_run:
            finish_moves(storage, directory.log)
        yield
    except ConnectionError as error:
        raise UnreachableError(
            f"{storage.where}: {operation} stopped: {error}. Repeat it."
        ) from error
    except OSError as error:
        raise SaveError(
            f"{storage.where}: {operation} stopped in the middle: {error}. No checkpoint is lost; "
            f"repeat it once the cause is repaired."
        ) from error
    finally:
        if not dry_run:
            directory.forget()
            directory.durable.clear()


def finish_moves(storage: Storage, log: RunLog) -> None:
    """Finish a rollback or an undo whose process was killed: its line has decided what moves.

    A checkpoint that a crash left in both places is committed, and its copy is deleted. One that does
    not continue what is committed was copied back, out of a backup: it stays aside.
    """
    view = log.view
    aside = list(filter(view.is_rolled_back, quarantined(storage)))
    committed = committed_steps(storage) if aside else []
    for name in aside:
        if (step := step_aside(name)) in committed and step is not None:
            try:
                data = storage.read(manifest_name(step))
                twin = storage.read(name)
            except ConnectionError:
                raise
            except OSError:
                continue  # what cannot be read stays where it is
            if data != twin:
                continue
            before = max((other for other in committed if other < step), default=None)
            if _has_fingerprint(storage, before, view.aside[name].after):
                storage.replace(manifest_name(step), data)
                storage.delete(name)
            else:
                storage.delete(manifest_name(step))
                committed.remove(step)  # the next copy does not follow it
    if view.moving is not None and log.check().problem is None:
        _move(storage, log)


def _has_fingerprint(storage: Storage, step: int | None, place: tuple[int, str] | None) -> bool:
    """Whether a committed step is the one of this number and fingerprint, or cannot be read."""
    if step is None or place is None:
        return step is place
    try:
        return (step, read_manifest(storage, step, None).fingerprint) == place
    except CorruptionError:
        return True
