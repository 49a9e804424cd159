"""The one writer of a run directory: it takes the lock, clears what a crash left, and gives it back."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from perdure.errors import CorruptionError, HistoryError, LockedError, SaveError, StoreError
from perdure.runtime.system import require_saving
from perdure.store.damage import DamageHandler
from perdure.store.directory import Directory
from perdure.store.format import LOCK, MANIFESTS
from perdure.store.loading import list_steps, read_manifest
from perdure.store.names import committed_steps, leftovers
from perdure.store.rollback import finish_moves
from perdure.store.run_events import Removed, Saved, Started
from perdure.store.run_log import newest_manifest
from perdure.store.run_marker import (
    claim_folders,
    new_marker,
    read_marker,
    require_folders,
    write_marker,
)
from perdure.store.view import START_OVER, View


class WriterSession:
    """From the first change of a `Run` to its `close`; it may begin again after that."""

    def __init__(
        self,
        directory: Directory,
        damage: DamageHandler,
        now: Callable[[], str],
        *,
        marked: bool,
    ) -> None:
        self.marked = marked
        """Whether the run directory has its marker."""
        self.holds_lock = False
        self.starts_over = False
        """Whether the user said that a run without a checkpoint begins again on purpose."""
        self.refusal: str | None = None
        """Why a save into the run as the writer found it would begin it again by accident."""
        self.before_new: Callable[[], object] = lambda: None
        """Is called before the marker of a new run is written."""
        self._ready = False
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._lock = ExitStack()
        self.directory, self.damage, self.now = directory, damage, now
        self._storage, self._log = directory.storage, directory.log

    def begin(self) -> None:
        """`Run.begin_writing`, which gives the contract."""
        self.check_process()
        with self._turn:  # the thread that saves, and the loop that writes into the journal
            if not self._ready:
                self._begin()

    def _begin(self) -> None:
        self.take_lock()
        try:
            self._claim()
            for name in leftovers(self._storage):
                self._storage.delete(name)
            finish_moves(self._storage, self._log)
        except OSError as error:
            self.close()
            raise SaveError(f"{self._storage.where}: cannot be written to: {error}.") from error
        except BaseException:
            self.close()
            raise
        self._ready = True
        if removed := {step for step, _ in self._log.view.removed}:
            for step in removed.intersection(list_steps(self._storage)):
                self.committed_again(step)
        self.damage.quarantine_deferred()

    def _claim(self) -> None:
        """Make sure that the place is this run, before anything in it changes; make a new run of it."""
        storage, log = self._storage, self._log
        if not self.marked:
            self.before_new()
            log.begin()
            newest = newest_manifest(storage)
            known = newest.run if newest is not None else log.view.run
            marker = new_marker(self.now(), known or log.run, log.made_from)
            write_marker(storage, marker)
            log.run, log.begun_from = marker.run, marker.made_from
            self.marked = True
        elif self.starts_over and log.unfinished is not None:
            self.finish()
        log.begin()
        assert log.run is not None
        require_folders(storage, log.run)
        steps = committed_steps(storage)
        view = View(storage, log)
        self.refusal = view.refusal_to_begin()
        if not steps and not self.starts_over and (why := view.lost_checkpoints()):
            raise HistoryError(f"{why}. Bring it back. {START_OVER} Nothing was changed.")
        claim_folders(storage, log.run)
        storage.make_folder(MANIFESTS)
        if log.view.last is None and log.view.problem is None:
            log.append(Started(run=log.run))
        if steps and log.view.saved is None and log.view.problem is None:
            # Whoever committed the first one was killed before this line.
            with suppress(OSError, CorruptionError):
                log.append(Saved(step=steps[0]))

    def finish(self) -> None:
        """`Run.finish`, which gives the contract."""
        marker = read_marker(self._storage, create=False)
        assert marker is not None
        write_marker(self._storage, msgspec.structs.replace(marker, made_from=None))
        self._log.begun_from = None

    def committed_again(self, step: int) -> None:
        """Note that a checkpoint that was removed has been committed again with the same bits."""
        if not any(step == removed for removed, _ in self._log.view.removed):
            return
        with suppress(OSError, StoreError):
            fingerprint = read_manifest(self._storage, step, self._log.run).fingerprint
            if (step, fingerprint) in self._log.view.removed:
                self._log.append(Removed(step=step, fingerprint=fingerprint, again=True))

    def take_lock(self) -> None:
        """`Run.take_lock`, which gives the contract."""
        self.check_process()
        if self.holds_lock:
            return
        require_saving(self._storage.where)
        owner = {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "since": self.now(),
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
                # is released when the collector finds it. A save under way refers to its own. A shell
                # keeps the last traceback, and with it the manager of a cell that failed.
                traceback.clear_frames(getattr(sys, "last_traceback", None))
                gc.collect()
                self._lock.enter_context(self._storage.lock(LOCK, text))
        except BlockingIOError as error:
            raise LockedError(self._locked(error)) from None
        except OSError as error:
            raise SaveError(f"{self._storage.where}: cannot be written to: {error}.") from error
        self.holds_lock = True
        # Another writer may have changed what was read before.
        self.directory.forget()
        self.directory.durable.clear()

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
        self.holds_lock = self._ready = False
        if os.getpid() != self._pid:
            return
        try:
            with self._lock:
                self._log.close()
        except OSError as error:
            raise SaveError(f"{self._storage.where}: {error}.") from error

    def _locked(self, error: BlockingIOError) -> str:
        where = self._storage.where
        if (since := _locked_here_since(error)) is not None:
            return (
                f"{where}: this process already has a manager (or a `Run`) open there, opened at "
                f"{since}. Nothing was changed. Close it, or use it. In a notebook, `Out` keeps one "
                f"with which a cell ended: call `Out.clear()`."
            )
        return (
            f"{where}: another process writes here: {(error.strerror or '').strip()}. Nothing was "
            f"changed. Stop that process, or use another run directory; the processes of one group "
            f"share a writer when the manager is given `processes=strategy.processes`."
        )


_token: tuple[int, str] = (0, "")


def _process_token() -> str:
    """A random text that no other process has, forked children included."""
    global _token
    if _token[0] != os.getpid():
        _token = os.getpid(), os.urandom(8).hex()
    return _token[1]


def _locked_here_since(error: BlockingIOError) -> str | None:
    """Since when this process holds the lock that refused it; None if another process does."""
    try:
        owner = json.loads(error.strerror or "")
        return str(owner["since"]) if owner["process"] == _process_token() else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
