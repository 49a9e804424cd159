"""Carrying the changes of one storage over to another: in order, one at a time, in the background."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from perdure.store.storage import Storage

PART_BYTES = 8 * 1024 * 1024


class _Change(NamedTuple):
    """Bring `name` over as it is now, or take it away there."""

    verb: str
    name: str


class _Refused(OSError):
    """Trying again would not help."""


class Carrier:
    """A queue of changes and the thread that carries them from `source` to `target`.

    The first change that fails stops the queue, so that the order holds. Its error is raised by the
    next `check` or `wait`, which also starts the queue again at the same change. An object that
    `refusal` has a reason against is left out for good, and raised as an error too.
    """

    def __init__(
        self, source: Storage, target: Storage, refusal: Callable[[str], str | None]
    ) -> None:
        self._source = source
        self._target = target
        self._refusal = refusal
        self._changes: deque[_Change] = deque()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()

    def put(self, name: str, replace: bool = False) -> None:
        """Queue an object as it is now; with `replace` over whatever is there."""
        self._add(_Change("replace" if replace else "put", name))

    def delete(self, name: str) -> None:
        """Queue the removal of an object."""
        self._add(_Change("delete", name))

    def leaving(self) -> set[str]:
        """Names whose last queued change is their removal."""
        return {name for name, verb in self._last().items() if verb == "delete"}

    def coming(self) -> set[str]:
        """Names that are still to be brought over."""
        return {name for name, verb in self._last().items() if verb != "delete"}

    def check(self) -> None:
        """Raise what a change raised, once, and try that change again; never waits."""
        with self._guard:
            error, self._error = self._error, None
            if error is not None:
                self._start()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Return once every change is carried over, or raise what the first one that fails raises."""
        with self._guard:
            # A change that is tried again speaks for itself; one that was left out never would.
            if not isinstance(self._error, _Refused):
                self._error = None
            self._start()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._guard:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _last(self) -> dict[str, str]:
        with self._guard:
            return {change.name: change.verb for change in self._changes}

    def _add(self, change: _Change) -> None:
        with self._guard:
            self._changes.append(change)
            self._start()

    def _start(self) -> None:
        if self._changes and self._thread is None and self._error is None:
            # Not a daemon: leaving Python normally finishes the upload.
            self._thread = threading.Thread(target=self._work, name="perdure-carry", daemon=False)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._changes or self._error is not None:
                    self._thread = None
                    return
                change: _Change | None = self._changes[0]
            failed: Exception | None = None
            try:
                self._carry(change)
            except _Refused as error:
                failed = error
                change = None
            except OSError as error:
                failed = OSError(
                    error.errno,
                    f"{change.name} is safe here and not yet there: {error.strerror or error}. It is "
                    f"tried again by the next save, and by the next writer",
                    error.filename,
                )
            except Exception as error:  # noqa: BLE001 (raised by the next call)
                failed = error
            with self._guard:
                self._error = failed
                if failed is None or change is None:
                    self._changes.popleft()

    def _carry(self, change: _Change) -> None:
        if change.verb == "delete":
            self._target.delete(change.name)
            return
        try:
            size = self._source.size(change.name)
        except FileNotFoundError:
            return  # gone meanwhile; its removal follows
        if change.verb == "replace":
            self._target.replace(change.name, self._source.read(change.name))
            return
        if (reason := self._refusal(change.name)) is not None:
            raise _Refused(
                errno.EIO,
                f"was not uploaded: {reason}. Run `perdure verify` on both",
                f"{self._source.where}/{change.name}",
            )
        try:
            self._copy(change.name, size)
        except FileNotFoundError:
            if self._is_there(change.name):
                raise

    def _is_there(self, name: str) -> bool:
        try:
            self._source.size(name)
        except FileNotFoundError:
            return False
        return True

    def _copy(self, name: str, size: int) -> None:
        sink = self._target.create(name, size)
        try:
            buffer = memoryview(bytearray(min(size, PART_BYTES)))
            at = 0
            while at < size:
                got = self._source.read_into(name, at, buffer[: size - at])
                if not got:
                    raise OSError(errno.EIO, f"ends at {at} of {size} bytes", name)
                sink.write(buffer[:got])
                at += got
            sink.commit()
        except FileExistsError:
            sink.abort()
            self._expect_equal(name, size)
        except BaseException:
            sink.abort()
            raise

    def _expect_equal(self, name: str, size: int) -> None:
        """After an upload whose end was not recorded: what is there must be what is here."""
        found = self._target.size(name)
        # The name of a large object is its own; that of a small one may be another writer's too.
        if found != size or (
            size <= PART_BYTES and self._target.read(name) != self._source.read(name)
        ):
            raise FileExistsError(
                errno.EEXIST,
                f"holds {found} other bytes than the {size} here; another writer made it",
                f"{self._target.where}/{name}",
            )
