"""Going back to an older checkpoint: newer ones move to quarantine, with notes that bring them back.

Invariant: after a crash at any operation the newest committed checkpoint is one of the line that was
rolled back, every other one of that line is either committed or in quarantine, and the same call can be
repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from perdure.errors import (
    CorruptionError,
    HistoryError,
    SaveError,
    UnreachableError,
)
from perdure.store.catalog import Catalog
from perdure.store.contents import committed_steps
from perdure.store.format import QUARANTINE, manifest_name, steps_text
from perdure.store.journal_moves import (
    ReturningLines,
    cut_journal,
    lines_aside,
    require_lines,
    return_journal,
    returning_lines,
)
from perdure.store.loading import list_pins, list_steps, read_manifest
from perdure.store.manifest import Manifest
from perdure.store.quarantine import move_to_quarantine, quarantined, reason_name
from perdure.store.rollback_notes import Note, RolledBack, returning, rollback_note, rolled_back
from perdure.store.storage import Storage


def roll_back(storage: Storage, step: int, *, when: str, dry_run: bool) -> list[int]:
    """Set every checkpoint that is newer than `step` aside; `Run.rollback` says the rest.

    Args:
        storage: The run directory. Its writer calls this inside `moving`.
        step: The checkpoint to go back to. It is read and verified first.
        when: The time that the notes give.
        dry_run: Check everything and change nothing.

    Returns:
        The newer steps, oldest first.
    """
    steps = list_steps(storage)
    newer = [other for other in steps if other > step]
    _require_whole(storage, step)
    require_lines(storage, step)
    if pinned := sorted(list_pins(storage) & set(newer)):
        raise HistoryError(
            f"{storage.where}: steps {steps_text(pinned)} are newer than {step} and pinned; nothing "
            f"was moved. Unpin them first (`manager.unpin`)."
        )
    if newer and not dry_run:
        put_aside(storage, {other: _readable(storage, other) for other in steps}, step, when)
    if not dry_run:
        cut_journal(storage, step)
    return newer


@dataclass(frozen=True)
class UndoPlan:
    """What undoing rollbacks brings back: checkpoints, the oldest first, and lines of the journal."""

    newest: Manifest | None
    line: tuple[RolledBack, ...] = ()
    lines: ReturningLines | None = None


def plan_undo(storage: Storage) -> UndoPlan:
    """What `undo_rollback` would do. Changes nothing.

    Raises `HistoryError` if nothing of what is set aside continues the run.
    """
    steps = list_steps(storage)
    candidates = rolled_back(storage)
    newest = read_manifest(storage, steps[-1]) if steps else None
    if newest is None and not candidates:
        return UndoPlan(None)
    line = returning(candidates, (newest.step, newest.fingerprint) if newest else None)
    before = newest.step if newest else -1
    lines = returning_lines(storage, before, [checkpoint.manifest for checkpoint in line])
    where = storage.where
    if not line and lines is not None and lines.replaced is not None:
        raise HistoryError(
            f"{where}: nothing was brought back: the lines of steps {lines.steps[0]} to "
            f"{lines.steps[1]} were set aside, and those of steps {lines.replaced[0]} to "
            f"{lines.replaced[1]} were recorded since."
        )
    if not line and lines is None:
        place = f"the newest checkpoint is {f'step {before}' if newest else 'gone'}"
        if candidates:
            raise HistoryError(
                f"{where}: nothing was brought back: {place}, and what rollbacks set aside continues "
                f"{_predecessors(candidates)}. Go back there first (`perdure rollback {where}@STEP`)."
            )
        if aside := [file.name for file in lines_aside(storage)]:
            raise HistoryError(
                f"{where}: nothing was brought back: {place}, and the lines of the journal in "
                f"{', '.join(aside)} do not continue it. They stay there."
            )
    return UndoPlan(newest, tuple(line), lines)


def undo_rollback(storage: Storage, *, dry_run: bool) -> list[int]:
    """Bring back what continues the newest checkpoint; `Run.undo_rollback` says the rest.

    Returns:
        The steps that return, oldest first.
    """
    plan = plan_undo(storage)
    if plan.newest and not dry_run:
        if plan.lines is not None:  # first: a checkpoint refers to its line
            return_journal(storage, plan.newest.step, plan.lines)
        put_back(storage, plan.line)
    return [returned.manifest.step for returned in plan.line]


@contextmanager
def moving(storage: Storage, catalog: Catalog, operation: str, *, dry_run: bool) -> Iterator[None]:
    """Finish what an earlier move began, then move; the catalog forgets everything afterwards.

    A dry run does neither. A failure of the storage becomes `UnreachableError` or `SaveError`, with the
    name of the `operation` in its text.
    """
    try:
        if not dry_run:
            finish_moves(storage)
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
            catalog.forget()
            catalog.durable.clear()


def finish_moves(storage: Storage) -> None:
    """Clear what a crash in the middle of a move leaves: a checkpoint that is in both places.

    It stays committed: its manifest is made durable, then the copy in quarantine is deleted.
    """
    aside = [name for name in quarantined(storage) if name.endswith(".json")]
    committed = set(committed_steps(storage)) if aside else set()
    for name in aside:
        step = int(digits) if (digits := name.removeprefix(QUARANTINE)[:12]).isdecimal() else -1
        if step in committed and rollback_note(storage, name) is not None:
            try:
                data = storage.read(manifest_name(step))
                twin = storage.read(name)
            except ConnectionError:
                raise
            except OSError:
                continue  # what cannot be read stays where it is
            if data == twin:
                storage.replace(manifest_name(step), data)
                storage.delete(name)
                storage.delete(reason_name(name))


def put_aside(
    storage: Storage, line: Mapping[int, Manifest | None], target: int, when: str
) -> None:
    """Move the manifests of all steps of `line` above `target` to quarantine, the newest first.

    `line` has every committed step, and its manifest if that is readable. Each move is durable before
    the next one.
    """
    rollbacks = [earlier.note.rollback for earlier in rolled_back(storage)]
    predecessor: tuple[int, str] | None = None
    notes: dict[int, Note] = {}
    for step, manifest in sorted(line.items()):
        if step > target:
            notes[step] = Note(
                name=manifest_name(step),
                found=when,
                reason=f"rolled back to step {target}",
                rolled_back_to=target,
                after=predecessor,
                rollback=1 + max(rollbacks, default=0),
            )
        if manifest is not None:
            predecessor = step, manifest.fingerprint
    for step in sorted(notes, reverse=True):
        note = msgspec.to_builtins(notes[step])
        move_to_quarantine(storage, manifest_name(step), f"{step:012d}", ".json", note)


def put_back(storage: Storage, line: Iterable[RolledBack]) -> None:
    """Move the manifests of `line` out of quarantine, the oldest first, each durable at once."""
    for returned in line:
        storage.move(returned.name, manifest_name(returned.manifest.step))
        storage.delete(reason_name(returned.name))


def _require_whole(storage: Storage, step: int) -> None:
    from perdure.store.reader import verify_leaves  # numpy: not needed to list a run

    try:
        verify_leaves(storage, read_manifest(storage, step))
    except CorruptionError as error:
        raise CorruptionError(f"{error} Nothing was moved; go back to another step.") from error


def _readable(storage: Storage, step: int) -> Manifest | None:
    try:
        return read_manifest(storage, step)
    except CorruptionError:
        return None


def _predecessors(candidates: Iterable[RolledBack]) -> str:
    """The checkpoints after which lines that were set aside would return, for an error."""
    places = {candidate.place for candidate in candidates}
    starts = {candidate.note.after for candidate in candidates} - places
    steps = sorted({after[0] for after in starts if after is not None})
    return f"step {steps_text(steps)}" if steps else "a checkpoint that is not there"
