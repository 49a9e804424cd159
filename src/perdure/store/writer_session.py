"""The one writer of a run directory: it takes the lock, clears what a crash left, and gives it back."""

from __future__ import annotations

import gc
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from perdure.errors import LockedError, SaveError
from perdure.store.catalog import Catalog
from perdure.store.contents import lost_manifests
from perdure.store.damage_handler import DamageHandler
from perdure.store.format import (
    LOCK,
    MANIFESTS,
    MARKER,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
)
from perdure.store.loading import list_steps
from perdure.store.removal_notes import RemovalNotes
from perdure.store.rollback import finish_moves
from perdure.store.run_marker import encode_marker
from perdure.store.storage import FolderStorage, Storage


class WriterSession:
    """From the first change of a `Run` to its `close`; it may begin again after that."""

    def __init__(
        self,
        catalog: Catalog,
        damage: DamageHandler,
        removals: RemovalNotes,
        now: Callable[[], str],
        *,
        marked: bool,
    ) -> None:
        self.marked = marked
        """Whether the run directory has its marker."""
        self.holds_lock = False
        self._ready = False
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._lock = ExitStack()
        self._storage = catalog.storage
        self._catalog = catalog
        self._damage = damage
        self._removals = removals
        self._now = now

    def begin(self) -> None:
        """`Run.begin_writing`, which gives the contract."""
        self.check_process()
        with self._turn:  # the thread that saves, and the loop that writes into the journal
            if not self._ready:
                self._begin()

    def _begin(self) -> None:
        self.take_lock()
        where = self._storage.where
        try:
            if not self.marked:
                self._storage.replace(MARKER, encode_marker(self._now()))
                self.marked = True
            if why := lost_manifests(self._storage):
                self.close()
                raise SaveError(f"{why}. Nothing was changed.")
            if isinstance(self._storage, FolderStorage):
                self._storage.make_folder(MANIFESTS)
            for name in leftovers(self._storage):
                self._storage.delete(name)
            finish_moves(self._storage)
            self._removals.load()
        except OSError as error:
            self.close()
            raise SaveError(f"{where}: cannot be written to: {error}.") from error
        self._ready = True
        if self._removals.steps:
            for step in self._removals.steps & set(list_steps(self._storage)):
                self._removals.committed_again(step)
        self._damage.quarantine_deferred()

    def take_lock(self) -> None:
        """`Run.take_lock`, which gives the contract."""
        self.check_process()
        if self.holds_lock:
            return
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._now(),
            "process": _process_token(),
        }
        text = json.dumps(owner).encode() + b"\n"
        try:
            try:
                self._lock.enter_context(self._storage.lock(LOCK, text))
            except BlockingIOError as error:
                if _locked_here_since(error) is None:
                    raise
                # One that nothing refers to any more, such as that of a notebook cell that ran before,
                # is released when the collector finds it. A save under way refers to its own.
                gc.collect()
                self._lock.enter_context(self._storage.lock(LOCK, text))
        except BlockingIOError as error:
            raise LockedError(self._locked(error)) from None
        except OSError as error:
            raise SaveError(f"{self._storage.where}: cannot be written to: {error}.") from error
        self.holds_lock = self._catalog.indexed = True
        # Another writer may have changed what was read before.
        self._catalog.forget()
        self._catalog.durable.clear()

    def check_process(self) -> None:
        """Raise `LockedError` in a process that was forked from the one that made this object."""
        if os.getpid() != self._pid:
            raise LockedError(
                f"{self._storage.where}: opened in process {self._pid}, and used in process "
                f"{os.getpid()}, which was forked from it. Nothing was changed. Save in the process "
                f"that opened it, or open another run directory in this one."
            )

    def close(self) -> None:
        """Give the lock back. In a forked child the lock stays with the parent."""
        self.holds_lock = self._ready = self._catalog.indexed = False
        if os.getpid() != self._pid:
            return
        try:
            self._lock.close()
        except OSError as error:
            raise SaveError(f"{self._storage.where}: {error}.") from error

    def _locked(self, error: BlockingIOError) -> str:
        where = self._storage.where
        if (since := _locked_here_since(error)) is not None:
            return (
                f"{where}: this process already has a manager (or a `Run`) open there, opened at "
                f"{since}. Nothing was changed. Close it, or use it."
            )
        return (
            f"{where}: another process writes here: {(error.strerror or '').strip()}. Nothing was "
            f"changed. Stop that process, or use another run directory; the processes of one group "
            f"share a writer when the manager is given `processes=strategy.processes`."
        )


def leftovers(storage: Storage) -> list[str]:
    """Temporary files of writers that did not finish."""
    folders = (MANIFESTS, PACKS, PINS, QUARANTINE)
    return sorted(
        name for folder in folders for name in storage.list(folder) if name.endswith(TEMP_SUFFIX)
    )


_token: tuple[int, str] = (0, "")


def _process_token() -> str:
    """A random text that no other process has, forked children included."""
    global _token
    if _token[0] != os.getpid():
        _token = os.getpid(), secrets.token_hex(8)
    return _token[1]


def _locked_here_since(error: BlockingIOError) -> str | None:
    """Since when this process holds the lock that refused it; None if another process does."""
    try:
        owner = json.loads(error.strerror or "")
        return str(owner["since"]) if owner["process"] == _process_token() else None
    except (ValueError, TypeError, KeyError):
        return None
