"""Heartbeats: a training process reports its step and phase to its supervisor.

The file PERDURE_HEARTBEAT_FILE holds one line of JSON of a fixed length, overwritten in place by
one system call (about 2 µs). Times are of the machine's monotonic clock. Invariant: one process
writes, the first that imports perdure. A child leaves the file alone, unless it alone reports
steps, and a parent takes it from a child that was earlier. What is rare, and longer than a line, is
a report beside it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from perdure.errors import HistoryError
from perdure.runtime.process_stat import PARENT, STATE, stat_fields
from perdure.runtime.system import IS_LINUX, at_fork, has_ended

VARIABLE = "PERDURE_HEARTBEAT_FILE"
SAVED_BEFORE = "saved-before"
"""The document that `perdure run` leaves for each worker: see `saved_before`."""
PHASES = ("start", "restore", "compile", "step", "save", "evaluate", "end")
LENGTH = 256


class Beat(msgspec.Struct):
    """The last heartbeat of a process. Steps count finished steps; times are monotonic seconds.

    `start` is the step that it began at, `first` when it reported `first_step` after it, `saving`
    the step that is being made durable.
    """

    phase: str
    step: int | None
    time: float
    pid: int
    start: int | None = None
    first: float | None = None
    saving: int | None = None
    first_step: int | None = None


def heartbeat(step: int, phase: str = "step") -> None:
    """Report to the supervisor that `step` steps are finished, in loops without a `CheckpointManager`.

    The first call reports the step that the loop starts at. Does nothing outside of `perdure run`.

    Args:
        step: The number of finished steps.
        phase: What comes next: "start", "restore", "compile", "step", "save", "evaluate" or "end". Each
            has a time limit of its own, so that a long compilation is not taken for a hang.

    Raises:
        ValueError: `phase` is none of these.
    """
    if phase not in PHASES:
        raise ValueError(f"phase: expected one of {', '.join(PHASES)}, found {phase!r}.")
    beat(phase, step)


def beat(phase: str, step: int | None = None) -> None:
    """`heartbeat` for perdure itself: `phase` is not checked, and `step` may be unknown."""
    if _owned_elsewhere is not None and step is not None:
        _take_for_steps(_owned_elsewhere)
    if _writer is not None:
        _writer.beat(phase, step)
    for listener in listeners:
        listener(phase, step)


def saving(step: int | None) -> None:
    """Report that `step` is being made durable in the background; None for no step."""
    if _writer is not None:
        _writer.last.saving = None if step is None else int(step)
        _writer.write()


def committed(directory: str, step: int | None) -> None:
    """Report that `step` is durable in a run directory, where every later start has to find it; None
    if the run begins there again on purpose."""
    path = os.environ.get(VARIABLE)
    if path:
        with suppress(OSError):  # a full memory, for instance, must not end the training
            report("saved", {**(read_report(path, "saved") or {}), directory: step})


def saved_before() -> dict[str, int | None]:
    """The newest step that earlier attempts under `perdure run` saved, by run directory."""
    path = os.environ.get(VARIABLE)
    return {} if not path else read_report(path, SAVED_BEFORE) or {}


def lost(directory: str, step: int | None) -> HistoryError:
    """The error for a run directory without a checkpoint, where an earlier attempt saved `step`."""
    return HistoryError(
        f"{directory}: no checkpoint is there; `perdure run` knows that step {step} was saved. It "
        f"may be not mounted, moved or set aside. A start at step 0 was refused, and nothing was "
        f"changed. Bring it back; to begin again on purpose, call `restore_or_initialize(..., "
        f"start_over=True)`, or give `perdure run` another --log-dir."
    )


@contextmanager
def reporting_refusal() -> Iterator[None]:
    """Report a `HistoryError`: `perdure run` ends with it, and does not restart the program."""
    try:
        yield
    except HistoryError as error:
        with suppress(OSError):
            report("refused", {"text": str(error)})
        raise


def report(name: str, document: dict[str, Any], path: str | None = None) -> bool:
    """Leave a document for `perdure run`, whole or not at all; False outside of it. `perdure run`
    leaves one for a worker beside the `path` of its heartbeat file."""
    path = path or os.environ.get(VARIABLE)
    if path:
        new = Path(f"{path}.{name}.{os.getpid()}")
        new.write_text(json.dumps(document), "utf-8")
        new.replace(f"{path}.{name}")
    return bool(path)


def read_report(path: str, name: str) -> dict[str, Any] | None:
    """The newest report `name` of the process with this heartbeat file; None if it left none."""
    try:
        return json.loads(Path(f"{path}.{name}").read_text("utf-8"))
    except FileNotFoundError:
        return None


def open_file() -> None:
    """Own the file that the environment names now, unless a process that is no child of ours does."""
    global _writer, _owned_elsewhere
    _writer, _owned_elsewhere = None, None
    path = os.environ.get(VARIABLE)
    if path and hasattr(os, "pwrite"):  # on Windows there is no supervisor to read it
        try:
            if _may_own(path):
                _writer = _Writer(path)
            else:
                _owned_elsewhere = path
        except OSError as error:
            _warn_unwritable(path, error)


def _take_for_steps(path: str) -> None:
    """Own the file at the first step, if its owner (a launcher, say) has reported none so far."""
    global _writer, _owned_elsewhere
    _owned_elsewhere = None
    with suppress(OSError, ValueError):
        owner = read(path)
        if owner is None or owner.step is None or _may_own(path):
            _writer = _Writer(path)


def release() -> None:
    """Leave the file to another process: this one does not train."""
    global _writer
    if _writer is not None:
        _writer.remove()
        _writer = None


def read(path: str) -> Beat | None:
    """The last beat in `path`; None before the first."""
    try:
        with open(path, "rb", buffering=0) as file:
            line = file.read(LENGTH)
            # One system call writes the line, but a read at the same time may still see half of it.
            while (again := os.pread(file.fileno(), LENGTH, 0)) != line:
                line = again
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(line, type=Beat) if line else None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


class _Writer:
    """Writes the beats of the process that trains."""

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        # A new file under the name: an owner that is displaced keeps writing to the old one.
        self._new = f"{path}.{self._pid}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._new, flags, 0o600)
        self.last = Beat("start", None, 0.0, self._pid)
        self._path = path
        self._warned = False
        # The thread that saves writes, too: its line must not be older than one that is there. A signal
        # handler may write in the middle of it.
        self._lock = threading.RLock()
        self.write()
        os.replace(self._new, path)

    def remove(self) -> None:
        """Remove the file if it is still ours."""
        os.close(self._file)
        with suppress(OSError):
            if (owner := read(self._path)) is not None and owner.pid == self._pid:
                os.unlink(self._path)

    def beat(self, phase: str, step: int | None) -> None:
        last = self.last
        if step is not None:
            step = int(step)
            if last.step is None or step < last.step:  # another run has begun in this process
                last.start, last.first, last.first_step = step, None, None
            last.step = step
        if phase == "step" and last.first is None:
            if last.step is None or last.step == last.start:
                phase = "compile"  # the first step has not ended, and the compiler runs in it
            else:
                last.first, last.first_step = time.monotonic(), last.step
        last.phase = phase
        self.write()

    def write(self) -> None:
        with self._lock:
            self.last.time = time.monotonic()
            line = msgspec.json.encode(self.last)
            try:
                os.pwrite(self._file, line.ljust(LENGTH - 1) + b"\n", 0)
            except OSError as error:  # a full memory, for instance, must not end the training
                if not self._warned:
                    self._warned = True
                    _warn_unwritable(self._path, error)


def _may_own(path: str) -> bool:
    """Whether the file has no owner, or one that has ended or was started by this process."""
    with suppress(ValueError):  # an owner that could not write its first beat
        owner = read(path)
        if owner is not None and owner.pid != os.getpid():
            return _has_ended(owner.pid) or os.getpid() in _ancestors(owner.pid)
    return True


def _has_ended(pid: int) -> bool:
    if not IS_LINUX:
        return has_ended(pid)
    try:
        return stat_fields(pid)[STATE] == "Z"
    except OSError:
        return True


def _ancestors(pid: int) -> list[int]:
    pids: list[int] = []
    with suppress(OSError):
        while pid > 1:
            pid = int(stat_fields(pid)[PARENT])
            pids.append(pid)
    return pids


def _warn_unwritable(path: str, error: OSError) -> None:
    warnings.warn(
        f"{path}: the heartbeat cannot be written: {error}. Training continues, and `perdure run` may "
        f"think that it hangs; free some space there.",
        stacklevel=3,
    )


def _forget() -> None:
    """A forked child does not train."""
    global _writer, _owned_elsewhere
    _writer, _owned_elsewhere = None, None
    listeners.clear()


_writer: _Writer | None = None
_owned_elsewhere: str | None = None
listeners: list[Callable[[str, int | None], None]] = []
"""Called at every beat; empty outside of `perdure drill`."""

open_file()
at_fork(after_in_child=_forget)
