"""What happens to the journal of a run when its history is cut or copied: rollback, undo, fork, copy.

A rollback to a step sets the later lines aside, in `rolled-back/<step>-<number>.jsonl`; undoing it
appends them again. Invariant: after a crash at any operation every line is in at least one of the two
files, and the same call can be repeated.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.errors import CorruptionError
from perdure.store.format import MAX_STEP
from perdure.store.journal_file import (
    FIRST_HASH,
    JOURNAL,
    JournalEntry,
    JournalLine,
    JournalWriter,
    encode_line,
    read_journal,
    read_lines,
)
from perdure.store.journal_reference import LineReference, line_reference
from perdure.store.local import LocalStorage
from perdure.store.manifest import Manifest
from perdure.store.storage import Storage

ROLLED_BACK = "rolled-back/"
_ASIDE = re.compile(re.escape(ROLLED_BACK) + r"(\d{12})-(\d+)\.jsonl")

StepRange = tuple[int, int]
"""The first and the last step of some lines."""


@dataclass(frozen=True)
class AsideLines:
    """Lines that were set aside.

    Attributes:
        step: The step that was gone back to.
        number: Grows from file to file.
        name: The file.
    """

    step: int
    number: int
    name: str


@dataclass(frozen=True)
class ReturningLines:
    """What undoing a rollback does to the journal.

    Attributes:
        files: The files that return, in the order of their steps.
        steps: The first and the last step of their lines.
        replaced: Those of the lines that were recorded since, and are set aside; None for none.
        is_there: Whether an undo that was interrupted has brought the lines back already.
    """

    files: tuple[AsideLines, ...]
    steps: StepRange
    replaced: StepRange | None
    is_there: bool


def lines_after(storage: Storage, step: int) -> StepRange | None:
    """The lines that a rollback to `step` sets aside, as far as they can be read; None for none."""
    if not isinstance(storage, LocalStorage):
        return None
    return _span([line for line in _unbroken(storage) if line.entry.step > step])


def require_lines(storage: Storage, step: int) -> None:
    """Raise `CorruptionError` if a line up to `step` may be damaged."""
    newest = -1
    try:
        for line in read_journal(storage):
            newest = line.entry.step
            if newest > step:
                return
    except CorruptionError:
        if newest != step:
            raise


def cut_journal(storage: Storage, step: int) -> str | None:
    """Set the lines after `step` and from the first broken one on aside; returns the file, if any.

    The process is the writer of the run directory.
    """
    return _cut(storage, step, step)


def cut_broken(storage: Storage, keep: int) -> str | None:
    """`cut_journal` for a repair: no rollback is undone by what it sets aside."""
    return _cut(storage, keep, MAX_STEP)


def _cut(storage: Storage, step: int, named: int) -> str | None:
    if not isinstance(storage, LocalStorage) or not os.path.isfile(storage.path(JOURNAL)):
        return None
    end = 0
    for line in _unbroken(storage):
        if line.entry.step > step:
            break
        end = line.end
    data = storage.read(JOURNAL)
    if len(data) == end:
        return None
    number = 1 + max((aside.number for aside in lines_aside(storage)), default=0)
    name = f"{ROLLED_BACK}{named:012d}-{number}.jsonl"
    storage.replace(name, data[end:])
    storage.replace(JOURNAL, data[:end])
    return name


def returning_lines(
    storage: Storage, before: int, checkpoints: Sequence[Manifest]
) -> ReturningLines | None:
    """The lines that rollbacks set aside and that continue the journal; None for none.

    Of several files that continue it, the one returns to which the next checkpoint refers, or else
    the one that was set aside last.

    Args:
        storage: The run directory.
        before: The newest checkpoint.
        checkpoints: Those that return with the lines, the oldest first.
    """
    if not isinstance(storage, LocalStorage) or not (aside := lines_aside(storage)):
        return None
    lines = list(_unbroken(storage))
    kept = [line for line in lines if line.entry.step <= before]
    newer = lines[len(kept) :]
    after = checkpoints[-1].step if checkpoints else before
    chosen: list[AsideLines] = []
    added: list[JournalLine] = []
    while True:
        last = (kept + added)[-1:]
        newest, previous = (last[0].entry.step, last[0].hash) if last else (-1, FIRST_HASH)
        for file in reversed(aside):
            tail = []
            if max(before, newest) <= file.step <= after:
                tail = _lines(storage, file, previous)
            if tail and _has_reference(file.step, tail, checkpoints):
                break
        else:
            break
        chosen.append(file)
        added += tail
    span = _span(added)
    if span is None:
        return None
    is_there = [line.hash for line in newer[: len(added)]] == [line.hash for line in added]
    return ReturningLines(tuple(chosen), span, None if is_there else _span(newer), is_there)


def return_journal(storage: Storage, before: int, returning: ReturningLines) -> None:
    """Append the lines again; what the journal has after `before` is set aside first.

    The process is the writer of the run directory.
    """
    assert isinstance(storage, LocalStorage)
    if not returning.is_there:
        data = storage.read(JOURNAL) if os.path.exists(storage.path(JOURNAL)) else b""
        end = max((line.end for line in _unbroken(storage) if line.entry.step <= before), default=0)
        if b"\n" in data[end:]:
            cut_journal(storage, before)
        tails = [storage.read(file.name) for file in returning.files]
        storage.replace(JOURNAL, b"".join([data[:end], *tails]))
    for file in reversed(returning.files):
        storage.delete(file.name)


def lines_aside(storage: Storage) -> list[AsideLines]:
    """The files of lines that were set aside, the oldest first."""
    if not isinstance(storage, LocalStorage):
        return []
    matches = filter(None, map(_ASIDE.fullmatch, storage.list(ROLLED_BACK)))
    files = [AsideLines(int(match[1]), int(match[2]), match[0]) for match in matches]
    return sorted(files, key=lambda file: file.number)


def remove_aside(storage: Storage) -> None:
    """Delete the lines that rollbacks and repairs set aside."""
    for file in lines_aside(storage):
        storage.delete(file.name)


def lines_to_carry(source: Storage, step: int, target: Storage) -> list[JournalEntry]:
    """The lines up to `step` that a copy of a run lacks; none if it has others. Changes nothing.

    Args:
        source: The run directory that is read. A run in a bucket has no journal.
        step: The newest checkpoint that is copied.
        target: The run directory that is written.

    Raises:
        CorruptionError: One of the journals is damaged. Lines of the source after `step` do not count.
    """
    if not isinstance(source, LocalStorage) or not isinstance(target, LocalStorage):
        return []
    last: JournalLine | None = None
    for line in read_journal(target):
        last = line
    require_lines(source, step)
    missing: list[JournalEntry] = []
    for line in _unbroken(source):
        entry = line.entry
        if last is not None and entry.step == last.entry.step and entry.state != last.entry.state:
            return []
        if entry.step <= step and (last is None or entry.step > last.entry.step):
            missing.append(entry)
    return missing


def carry_journal(source: Storage, step: int, target: Storage) -> None:
    """Give a copy of a run the lines up to `step`, those that it lacks.

    A target whose own lines have other digests keeps them alone.

    Args:
        source, step: As for `lines_to_carry`.
        target: The run directory whose writer this process is.

    Raises:
        CorruptionError: One of the journals is damaged.
        OSError: The journal cannot be written.
    """
    missing = lines_to_carry(source, step, target)
    if not missing or not isinstance(target, LocalStorage):
        return
    last: JournalLine | None = None
    for line in read_journal(target):
        last = line
    if last is None:
        texts, previous = [], FIRST_HASH
        for entry in missing:
            text, previous = encode_line(entry, previous)
            texts.append(text)
        target.replace(JOURNAL, b"".join(texts))
        return
    writer = JournalWriter(target, last.hash, last.end)
    try:
        for entry in missing:
            writer.append(entry)
        writer.sync()
    finally:
        writer.close()


def _has_reference(step: int, tail: Sequence[JournalLine], checkpoints: Sequence[Manifest]) -> bool:
    """Whether lines after `step` are those to which the next of the returning checkpoints refers."""
    following = next((checkpoint for checkpoint in checkpoints if checkpoint.step > step), None)
    line = None if following is None else line_reference(following)
    if line is None or line.step <= step:
        return True
    return any(LineReference(other.entry.step, other.hash) == line for other in tail)


def _span(lines: Sequence[JournalLine]) -> StepRange | None:
    return (lines[0].entry.step, lines[-1].entry.step) if lines else None


def _unbroken(storage: LocalStorage) -> Iterator[JournalLine]:
    """The lines up to the first broken one."""
    try:
        yield from read_journal(storage)
    except CorruptionError:
        return


def _lines(storage: LocalStorage, file: AsideLines, previous: str) -> list[JournalLine]:
    """The lines that were set aside up to the first broken one; none unless they follow `previous`."""
    lines = []
    try:
        for line in read_lines(io.BytesIO(storage.read(file.name)), file.name, previous):
            lines.append(line)
    except CorruptionError:
        pass
    return lines
