"""A log: lines of JSON, each with a kind, which are appended and chained by hashes.

    {"hash":"<32 digits>","kind":"step","step":120,...}

`hash` covers the line and the hash of the line before, so that a line that was changed, removed or
moved is found. On a file system a log is the file `NAME.jsonl`, in a bucket each line is an object,
`NAME/<number>.json`. Each log has one writer at a time.

Invariant: lines are only appended. An incomplete last line, left by a killed writer, is no line: a
reader ignores it and the next writer cuts it off. After a damaged line nothing is appended, and
whoever decides by the log decides nothing.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.runtime.system import sync_file
from perdure.store.failures import reading
from perdure.store.local import LocalStorage
from perdure.store.regular_file import NotAFile, open_regular
from perdure.store.storage import Storage, create_whole

FIRST_HASH = "0" * 32
"""What stands for the hash of the line before the first."""

MAX_LINE_BYTES = 64 * 1024 * 1024

_HASH_BYTES = len(FIRST_HASH) // 2
_BEGINNING = b'{"hash":"'
_REST = len(_BEGINNING) + len(FIRST_HASH) + len(b'",')
T = TypeVar("T")


class LineReference(NamedTuple):
    """Number, from 1, and hash of a line: equal ones are the same line after the same lines."""

    number: int
    hash: str


class Line(Struct, frozen=True, gc=False):
    """One line of a log: its number from 1, its hash, its JSON without that, its end."""

    number: int
    hash: str
    rest: bytes
    end: int = 0

    @property
    def reference(self) -> LineReference:
        """By which another file refers to the line."""
        return LineReference(self.number, self.hash)

    def decode(self, decoder: msgspec.json.Decoder[T], where: str) -> T:
        """The event; raises `CorruptionError` if it does not fit."""
        try:
            return decoder.decode(b"{" + self.rest)
        except (ValueError, RecursionError) as error:
            raise broken(where, self.number, str(error)) from None


def encode_line(event: Struct | Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """The line of `event`, which begins with its kind, and its hash after one with hash `previous`."""
    rest = msgspec.json.encode(event)[1:]
    digest = _hash(previous, rest)
    return b'%b%b",%b\n' % (_BEGINNING, digest.encode(), rest), digest


def read_lines(file: BinaryIO, where: str) -> Iterator[Line]:
    """The lines of a log file from its beginning, each checked; CorruptionError for another one."""
    previous, end = FIRST_HASH, 0
    for number, text in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
        if not text.endswith(b"\n") and len(text) < MAX_LINE_BYTES:
            return
        end += len(text)
        line = _checked(text, number, previous, end, where)
        previous = line.hash
        yield line


def read_log(storage: Storage, name: str) -> Iterator[Line]:
    """The checked lines of the log `name`, none if there is no log.

    Raises CorruptionError if a line was changed or is missing, UnreachableError if it cannot be
    read.
    """
    where = f"{storage.where}/{log_place(storage, name)}"
    with reading(where):
        if isinstance(storage, LocalStorage):
            yield from _read_file(storage.path(f"{name}.jsonl"), where)
            return
        previous = FIRST_HASH
        for number, place in enumerate(sorted(storage.list(f"{name}/")), 1):
            if place != _object(name, number):
                raise broken(where, number, f"expected {_object(name, number)}, found {place}")
            line = _checked(storage.read(place), number, previous, 0, where)
            previous = line.hash
            yield line


def log_place(storage: Storage, name: str) -> str:
    """The name of a log in messages."""
    return f"{name}.jsonl" if isinstance(storage, LocalStorage) else f"{name}/"


def log_texts(storage: Storage, name: str) -> list[bytes]:
    """The lines of a log as they are, good or damaged, without an incomplete last one."""
    if isinstance(storage, LocalStorage):
        try:
            data = storage.read(f"{name}.jsonl")
        except FileNotFoundError:
            return []
        return [text + b"\n" for text in data.split(b"\n")[:-1]]
    return [storage.read(place) for place in sorted(storage.list(f"{name}/"))]


def next_line(before: bytes, text: bytes) -> Line:
    """A line, if it fits the hash that the line before states; raises `CorruptionError` otherwise."""
    previous = before[len(_BEGINNING) : _REST - 2].decode(errors="replace")
    return _checked(text, 0, previous, 0, "")


def rewrite_log(storage: Storage, name: str, texts: Sequence[bytes]) -> None:
    """Replace the lines of a log by others, durably. Nobody has it open."""
    if isinstance(storage, LocalStorage):
        storage.replace(f"{name}.jsonl", b"".join(texts))
        return
    old = set(storage.list(f"{name}/"))
    for number, text in enumerate(texts, 1):
        if (place := _object(name, number)) not in old or storage.read(place) != text:
            storage.replace(place, text)
        old.discard(place)
    for place in old:
        storage.delete(place)


class LogWriter:
    """Appends lines to the log `name` in a directory or bucket, whose writer this process is.

    What lies after `last`, the last line that the caller has read, was left by a killed writer and
    is cut off.
    """

    def __init__(self, storage: Storage, name: str, last: Line | None = None) -> None:
        self._storage, self._name = storage, name
        self._number, self._hash = (last.number, last.hash) if last else (0, FIRST_HASH)
        self._end = last.end if last else 0
        self._closing = threading.Lock()  # a background save may be syncing
        self._descriptor: int | None = None
        self._is_synced = True
        if isinstance(storage, LocalStorage):
            self._disk, self._file = storage, f"{name}.jsonl"
            self._path = storage.path(self._file)
            storage.check_lock()
            self._open()

    def append(self, event: Struct | Mapping[str, Any]) -> Line:
        """Write one line. It survives the end of this process, and a power loss after `sync`.

        One thread at a time calls this; another one may call `sync` meanwhile. After an OSError
        nothing of the line is left.
        """
        text, digest = encode_line(event, self._hash)
        if isinstance(self._storage, LocalStorage):
            self._append(text)
        else:
            create_whole(self._storage, _object(self._name, self._number + 1), text)
        self._number, self._hash = self._number + 1, digest
        return Line(self._number, digest, text[_REST:-1])

    def sync(self) -> None:
        """Make all lines durable; lines that are appended meanwhile may not be."""
        with self._closing:
            if self._descriptor is None or self._is_synced:
                return
            self._is_synced = True
            try:
                self._disk.step("fsync", self._path)
                sync_file(self._descriptor)
            except OSError:
                self._is_synced = False
                raise

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._closing:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None and not sys.is_finalizing():
            self.close()

    def _append(self, text: bytes) -> None:
        self._disk.check_lock()
        self._require_same_file()
        descriptor = self._descriptor
        assert descriptor is not None
        self._is_synced = False
        self._disk.step("write", self._path)
        try:
            view = memoryview(text)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            os.ftruncate(descriptor, self._end)
            raise
        self._end += len(text)

    def _open(self) -> None:
        is_new = not os.path.exists(self._path)
        self._disk.step("open", self._path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            self._descriptor = open_regular(self._path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                reason = "the log is a symbolic link; put the file itself there"
                raise OSError(errno.ELOOP, reason, self._path) from None
            raise
        if is_new:
            self._disk.sync_parent(self._file)
        status = os.fstat(self._descriptor)
        self._identity = status.st_dev, status.st_ino
        if status.st_nlink > 1:
            self._copy()
        elif status.st_size > self._end:
            os.ftruncate(self._descriptor, self._end)

    def _require_same_file(self) -> None:
        """Raise `OSError` unless the open file is still at its path, with the lines of this writer."""
        there = os.stat(self._path)
        if (there.st_dev, there.st_ino, there.st_size) != (*self._identity, self._end):
            raise OSError(
                errno.ESTALE, "the file was replaced or changed while it was open", self._path
            )
        if there.st_nlink > 1:
            self._copy()

    def _copy(self) -> None:
        """Give the log a file of its own: a copy by `cp -al` shares the file with its origin."""
        with open(open_regular(self._path), "rb") as file:
            data = file.read(self._end)
        self.close()
        self._disk.replace(self._file, data)
        self._open()


def broken(where: str, number: int, why: str) -> CorruptionError:
    """The error of a damaged line."""
    return CorruptionError(
        f"{where}: line {number}: {why}. Expected lines as they were written: the log was changed or "
        f"damaged."
    )


def _read_file(path: str, where: str) -> Iterator[Line]:
    try:
        file = open(open_regular(path), "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        if os.path.islink(path):
            raise _no_file(where, "a link to a file that is not there") from None
        return
    except NotAFile as error:
        raise _no_file(where, str(error.strerror)) from None
    with file:
        yield from read_lines(file, where)


def _no_file(where: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"{where}: expected a regular file, found another thing ({found}). Bring the file back from a "
        f"copy."
    )


def _checked(text: bytes, number: int, previous: str, end: int, where: str) -> Line:
    rest = text[_REST:-1]
    digest = _hash(previous, rest)
    if not text.endswith(b"\n") or text[:_REST] != b'%b%b",' % (_BEGINNING, digest.encode()):
        raise broken(where, number, "the hash does not fit the line and those before it")
    return Line(number, digest, rest, end)


def _object(name: str, number: int) -> str:
    return f"{name}/{number:012d}.json"


def _hash(previous: str, rest: bytes) -> str:
    return blake3(previous.encode() + rest).hexdigest(_HASH_BYTES)
