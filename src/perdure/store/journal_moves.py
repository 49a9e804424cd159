"""What happens to the journal of a run when its history is cut or copied: rollback, undo, fork, copy.

A rollback to a step sets the later lines aside, in `rolled-back/<step>-<number>.jsonl`; undoing it
appends them again. Invariant: after a crash at any operation every line is in at least one of the two
files, and the same call can be repeated.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator

from perdure.errors import CorruptionError
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
from perdure.store.local import LocalStorage
from perdure.store.storage import Storage

ROLLED_BACK = "rolled-back/"
_ASIDE = re.compile(re.escape(ROLLED_BACK) + r"(\d{12})-(\d+)\.jsonl")


def cut_journal(storage: Storage, step: int) -> bool:
    """Set the lines after `step` and from the first broken one on aside; True if there were any.

    The process is the writer of the run directory.
    """
    if not isinstance(storage, LocalStorage) or not os.path.isfile(storage.path(JOURNAL)):
        return False
    end = 0
    for line in _unbroken(storage):
        if line.entry.step > step:
            break
        end = line.end
    data = storage.read(JOURNAL)
    if len(data) == end:
        return False
    number = 1 + max((number for _, number, _ in _aside(storage)), default=0)
    storage.replace(f"{ROLLED_BACK}{step:012d}-{number}.jsonl", data[end:])
    storage.replace(JOURNAL, data[:end])
    return True


def return_journal(storage: Storage, before: int, after: int) -> None:
    """Bring back the lines that rollbacks set aside, once the newest checkpoint is `after` again.

    Args:
        storage: The run directory. The process is its writer.
        before: The newest checkpoint before that.
        after: The newest checkpoint now.
    """
    if not isinstance(storage, LocalStorage):
        return
    newest = {step: name for step, _, name in _aside(storage) if before <= step < after}
    for step, name in sorted(newest.items()):
        kept, previous = 0, FIRST_HASH
        for line in _unbroken(storage):
            if line.entry.step > step:
                break
            kept, previous = line.end, line.hash
        tail = storage.read(name)
        if next(_lines(tail, storage.path(name), previous), None) is None:
            continue  # it continues lines that are not there any more
        data = storage.read(JOURNAL) if kept else b""
        storage.replace(JOURNAL, data[:kept] + tail)
        storage.delete(name)


def remove_aside(storage: Storage) -> None:
    """Delete the lines that rollbacks set aside."""
    if not isinstance(storage, LocalStorage):
        return
    for _, _, name in _aside(storage):
        storage.delete(name)


def carry_journal(source: Storage, step: int, target: Storage) -> None:
    """Give a copy of a run the lines up to `step`, those that it lacks.

    A target whose own lines have other digests keeps them alone. A run in a bucket has no journal.

    Args:
        source: The run directory that is read.
        step: The newest checkpoint that was copied.
        target: The run directory whose writer this process is.

    Raises:
        CorruptionError: One of the journals is damaged.
        OSError: The journal cannot be written.
    """
    if not isinstance(source, LocalStorage) or not isinstance(target, LocalStorage):
        return
    last: JournalLine | None = None
    for line in read_journal(target):
        last = line
    missing: list[JournalEntry] = []
    for line in read_journal(source):
        entry = line.entry
        if last is not None and entry.step == last.entry.step and entry.state != last.entry.state:
            return
        if entry.step <= step and (last is None or entry.step > last.entry.step):
            missing.append(entry)
    if not missing:
        return
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


def _aside(storage: Storage) -> list[tuple[int, int, str]]:
    """Step, number and name of each file of lines that were set aside, the oldest first."""
    matches = filter(None, map(_ASIDE.fullmatch, storage.list(ROLLED_BACK)))
    files = [(int(match[1]), int(match[2]), match[0]) for match in matches]
    return sorted(files, key=lambda file: file[1])


def _unbroken(storage: LocalStorage) -> Iterator[JournalLine]:
    """The lines up to the first broken one."""
    try:
        yield from read_journal(storage)
    except CorruptionError:
        return


def _lines(data: bytes, where: str, previous: str) -> Iterator[JournalLine]:
    """The lines up to the first broken one, of a file that continues a line with a hash."""
    try:
        yield from read_lines(io.BytesIO(data), where, previous)
    except CorruptionError:
        return
