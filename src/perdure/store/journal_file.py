"""`journal.jsonl` of a run directory: one line for each recorded step, chained by hashes.

    {"hash":"<32 digits>","step":120,"state":"<32 digits>",...}

`hash` covers the line and the hash of the line before, so that a line that was changed, removed or
moved is found. Invariant: steps grow from line to line, and lines are only appended. Only a rollback
takes lines away, and sets them aside (`journal_moves`).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
from blake3 import blake3
from msgspec import Struct

from perdure.errors import CorruptionError, UnreachableError
from perdure.store.local import LocalStorage

JOURNAL = "journal.jsonl"
FIRST_HASH = "0" * 32
"""What stands for the hash of the line before the first."""

REPAIR_ADVICE = (
    " Nothing was changed now. Bring the file back from a copy, or let `perdure verify --repair` set "
    "aside what follows the last good line, and continue without the lines that are lost."
)
"""The end of every error about a damaged journal."""

_BEGINNING = b'{"hash":"'
_REST = len(_BEGINNING) + len(FIRST_HASH) + len(b'",')


class JournalEntry(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What a journal has about one step.

    Attributes:
        step: How many steps the state contains.
        state: Digest of the state after the step.
        total: Digest of the contributions summed over all logical replicas, before the update.
        batch: Digest of the global batch of the step.
        metrics: Numbers; None stands for NaN and the infinities.
        attempt: The number of the attempt that recorded it.
        topology: `host`, `processes`, and `devices` if a strategy computed the step. It must never
            decide a digest.
    """

    step: int
    state: str
    total: str | None = None
    batch: str | None = None
    metrics: dict[str, float | None] = {}
    attempt: int
    topology: dict[str, int | str] = {}


class JournalLine(Struct, frozen=True, gc=False):
    """An entry as it stands in a file.

    Attributes:
        entry: The entry.
        hash: The hash that the next line is chained to.
        number: The number of the line, from 1.
        start: Where the line begins, in bytes.
        end: Where the next one begins.
    """

    entry: JournalEntry
    hash: str
    number: int
    start: int
    end: int


def first_difference(one: JournalEntry, two: JournalEntry) -> tuple[str, str, str] | None:
    """What differs first in the order of the computation, and both digests; None for nothing.

    Digests that only one of the two has are not compared.
    """
    for what in ("batch", "total", "state"):
        digests = getattr(one, what), getattr(two, what)
        if None not in digests and digests[0] != digests[1]:
            return what, *digests
    return None


def encode_line(entry: JournalEntry, previous: str) -> tuple[bytes, str]:
    """The line of `entry` after a line with the hash `previous`, and its own hash."""
    text = msgspec.json.encode(entry)
    digest = _hash(previous, text[1:])
    return b'%b%b",%b\n' % (_BEGINNING, digest.encode(), text[1:]), digest


def read_lines(file: BinaryIO, where: str, previous: str = FIRST_HASH) -> Iterator[JournalLine]:
    """The lines of a journal, each checked against the one before.

    An incomplete last line, which a killed writer may leave, is left out.

    Args:
        file: The journal, at its beginning.
        where: Its name in errors.
        previous: The hash of the line before the first one.

    Raises:
        CorruptionError: A line was changed, or lines are missing before it.
    """
    decode = msgspec.json.Decoder(JournalEntry).decode
    end, step = 0, -1
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        rest = line[_REST:-1]
        digest = _hash(previous, rest)
        if line[:_REST] != b'%b%b",' % (_BEGINNING, digest.encode()):
            raise _broken(where, number, step, "the hash does not fit the line and those before it")
        try:
            entry = decode(b"{" + rest)
        except (ValueError, RecursionError) as error:
            raise _broken(where, number, step, str(error)) from None
        if entry.step <= step:
            raise _broken(where, number, step, f"step {entry.step} comes after step {step}")
        start, end, step, previous = end, end + len(line), entry.step, digest
        yield JournalLine(entry, digest, number, start, end)


def read_journal(storage: object) -> Iterator[JournalLine]:
    """The lines of the journal in a run directory; none if it has no journal.

    Raises:
        CorruptionError: A line was changed, or lines are missing before it.
        UnreachableError: The file cannot be read.
    """
    if not isinstance(storage, LocalStorage):
        return
    path = storage.path(JOURNAL)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _no_file(path, "another thing")
            yield from read_lines(file, path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise _no_file(path, "a link to a file that is not there") from None
    except OSError as error:
        raise UnreachableError(
            f"{path}: the journal cannot be read: {error}. Nothing was changed; correct the cause, "
            f"then try again."
        ) from error


class JournalWriter:
    """Appends lines to the journal of a run directory, whose writer this process is.

    Args:
        storage: The run directory.
        hash: The hash of the last line that is there; `FIRST_HASH` for none.
        end: Where that line ends. What lies after it is cut off: a killed writer has left it.

    Raises:
        OSError: The file cannot be opened or cut.
    """

    def __init__(self, storage: LocalStorage, hash: str = FIRST_HASH, end: int = 0) -> None:
        self._storage = storage
        self._path = storage.path(JOURNAL)
        self._hash = hash
        self._closing = threading.Lock()  # a background save may be syncing
        self._end = end
        storage.check_lock()
        is_new = not os.path.exists(self._path)
        storage.step("open", self._path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file: int | None = os.open(self._path, flags, 0o644)
        if is_new:
            storage.sync_parent(JOURNAL)
        if os.fstat(self._file).st_size > end:
            os.ftruncate(self._file, end)

    def append(self, entry: JournalEntry) -> str:
        """Write one line. It survives the end of this process, and a power loss after `sync`.

        Returns:
            The hash of the line.

        Raises:
            OSError: It could not be written; nothing of it is left.
        """
        assert self._file is not None
        self._storage.check_lock()
        line, digest = encode_line(entry, self._hash)
        self._storage.step("write", self._path)
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._hash = digest
        self._end += len(line)
        return digest

    def sync(self) -> None:
        """Make all lines durable; those that are appended meanwhile may not be."""
        with self._closing:
            if self._file is not None:
                self._storage.step("fsync", self._path)
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._closing:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file for `open`, also a pipe that nobody writes into."""
    return os.open(path, flags | os.O_NONBLOCK)


def _hash(previous: str, rest: bytes) -> str:
    return blake3(previous.encode() + rest).hexdigest(len(FIRST_HASH) // 2)


def _no_file(path: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: expected a regular file, found {found}. Bring the file back from a copy, or remove "
        f"what is there; `perdure verify` then says what is lost."
    )


def _broken(where: str, number: int, step: int, why: str) -> CorruptionError:
    after = f"after step {step}" if step >= 0 else "before the first step"
    return CorruptionError(
        f"{where}: line {number}, {after}: {why}. Expected lines as they were written: the journal was "
        f"changed or damaged.{REPAIR_ADVICE}"
    )
