"""Heartbeats: how a training process tells its supervisor where it is.

Owns the file named by PERDURE_HEARTBEAT_FILE: one line of JSON of a fixed length, written over in
place by one system call (about 2 µs). Without the variable a beat costs one comparison. Times are of
the machine's monotonic clock, which all its processes share and which no change of the date moves.
Invariant: one process writes. The first that imports this takes the variable out of its environment,
so that no data worker that it starts writes over what the loop has said.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

VARIABLE = "PERDURE_HEARTBEAT_FILE"
PHASES = ("start", "restore", "compile", "step", "save", "evaluate", "end")
LENGTH = 256


@dataclass(frozen=True)
class Beat:
    """What a process said last. Steps count the finished ones; times are seconds, monotonic.

    `start` is the step that it began at, `first` when it first told of a new one and `first_step`
    which that was (a later one than `start + 1` in a loop that gives a beat every so many steps),
    `saving` the step that is being made durable in the background.
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
    """Tell the supervisor that `step` steps are finished, for loops without a `CheckpointManager`.

    `phase` is what comes now: "start", "restore", "compile", "step", "save", "evaluate", "end"; each
    has a limit of its own, so that compiling is not hanging. The first call says where the loop
    starts. Nothing happens outside of `perdure run`.
    """
    if phase not in PHASES:
        raise ValueError(f"phase: expected one of {', '.join(PHASES)}, found {phase!r}.")
    beat(phase, step)


def beat(phase: str, step: int | None = None) -> None:
    """`heartbeat` for the library itself: `phase` is not checked, and `step` may be unknown."""
    if _writer is not None:
        _writer.beat(phase, step)
    for listener in listeners:
        listener(phase, step)


def saving(step: int | None) -> None:
    """What is being made durable in the background; None for nothing."""
    if _writer is not None:
        _writer.saving = step
        _writer.write()


def open_file() -> None:
    """Begin, or begin anew, with the file that the environment names now."""
    global _writer
    path = os.environ.pop(VARIABLE, None)
    _writer = None
    if path:
        try:
            _writer = _Writer(path)
        except OSError as error:
            _unwritten(path, error)


def read(path: str) -> Beat | None:
    """The last beat in `path`; None before the first."""
    try:
        with open(path, "rb", buffering=0) as file:
            line = file.read(LENGTH)
            # One system call writes it, and still a read beside it may see half of either.
            while (again := os.pread(file.fileno(), LENGTH, 0)) != line:
                line = again
    except FileNotFoundError:
        return None
    return Beat(**json.loads(line)) if line else None


class _Writer:
    """The side of the process that trains."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()
        self._phase = "start"
        self._step: int | None = None
        self._start: int | None = None
        self._first: float | None = None
        self._first_step: int | None = None
        self.saving: int | None = None
        self._path: str | None = path
        self.write()

    def beat(self, phase: str, step: int | None) -> None:
        if step is not None:
            if self._step is None or step < self._step:  # another run may follow in one process
                self._start, self._first, self._first_step = step, None, None
            self._step = step
        if phase == "step" and self._first is None:
            if self._step is None or self._step == self._start:
                phase = "compile"  # the first step is still to come, and with it the compiler
            else:
                self._first, self._first_step = time.monotonic(), self._step
        self._phase = phase
        self.write()

    def write(self) -> None:
        first = "null" if self._first is None else f"{self._first:.6f}"
        line = (
            f'{{"phase": "{self._phase}", "step": {_text(self._step)}, '
            f'"time": {time.monotonic():.6f}, "pid": {self._pid}, "start": {_text(self._start)}, '
            f'"first": {first}, "saving": {_text(self.saving)}, '
            f'"first_step": {_text(self._first_step)}}}'
        )
        try:
            os.pwrite(self._file, f"{line:<{LENGTH - 1}}\n".encode(), 0)
        except OSError as error:  # memory is full, for instance; no reason to end a training
            if self._path is not None:
                path, self._path = self._path, None
                _unwritten(path, error)


def _unwritten(path: str, error: OSError) -> None:
    warnings.warn(
        f"{path}: the heartbeat cannot be written: {error}. Training continues, and `perdure run` may "
        f"take it for hung; free some space there.",
        stacklevel=3,
    )


def _text(number: int | None) -> str:
    return "null" if number is None else str(int(number))


def _forget() -> None:
    """A forked child trains nothing."""
    global _writer
    _writer = None
    listeners.clear()


_writer: _Writer | None = None
listeners: list[Callable[[str, int | None], None]] = []
"""Called at every beat; empty outside of `perdure drill`."""

open_file()
os.register_at_fork(after_in_child=_forget)
