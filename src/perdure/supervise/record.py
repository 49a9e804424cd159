"""The log of one run of a supervisor, beside the logs of its workers: written, and read.

Its form is that of every log (`perdure.store.log`). Invariant: a log that cannot be written ends no
run; what could not be written waits in memory until it can.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.runtime.process_stat import START, stat_fields
from perdure.store.local import LocalStorage
from perdure.store.log import LogWriter, read_lines
from perdure.store.regular_file import open_regular
from perdure.supervise.history import AttemptRecord, Summary
from perdure.supervise.worker_log import remedy

NAME = "attempts"
FILE = f"{NAME}.jsonl"
KEPT_LINES = 10_000
"""Lines that wait in memory for space on the disk."""


class _Event(Struct, tag_field="kind"):
    time: str


class _Start(_Event, tag="start"):
    command: list[str]
    directory: str
    workers: int
    logs: str
    host: str
    pid: int
    boot: str | None
    pid_namespace: int | None
    process_start: int | None


class _Attempt(_Event, tag="attempt"):
    attempt: int
    workers: int


class _Progress(_Event, tag="progress"):
    attempt: int
    step: int
    phase: str
    saved: dict[str, int]


class AttemptEnded(_Event, tag="attempt_end"):
    """The end of an attempt, with seconds of the longest silence of the run in each phase."""

    attempt: AttemptRecord
    longest: dict[str, float]


class _Message(_Event, tag="message"):
    text: str


class _End(_Event, tag="end"):
    status: int
    reason: str
    seconds: float


_DECODER = msgspec.json.Decoder(_Start | _Attempt | _Progress | AttemptEnded | _Message | _End)


def timestamp(seconds: float | None = None) -> str:
    """The time of day in UTC, such as `2026-01-31T23:59:59.123Z`; by default now."""
    seconds = time.time() if seconds is None else seconds
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


class AttemptsLog:
    """Writes the log of one run.

    Args:
        logs: The directory of its logs, which has no such file yet.
        report: Is called once with a message if the file cannot be written.
    """

    def __init__(self, logs: Path, report: Callable[[str], None]) -> None:
        self._logs = logs
        self._report = report
        self._writer: LogWriter | None = None
        self._first: dict[str, Any] | None = None
        self._waiting: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        self._was_reported = False

    def add(self, kind: str, **fields: Any) -> None:
        """Append one event with the time of day; if the disk is full, later events write it too."""
        event = {"kind": kind, "time": timestamp(), **encodable(fields)}
        self._first = self._first or event
        self._waiting.append(event)
        path = self._logs / FILE
        try:
            if self._writer is None or not path.exists():  # it was removed
                self._begin()
            assert self._writer is not None
            while self._waiting:
                self._writer.append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._was_reported:
                self._was_reported = True
                self._report(
                    f"{path}: the log of the run cannot be written: {error}; the run continues, and "
                    f"what is missing is added once it can be written again: {remedy(error, path)}"
                )

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self) -> None:
        self.close()
        if self._first is not self._waiting[0] and self._first is not None:
            self._waiting.appendleft(self._first)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._writer = LogWriter(LocalStorage(self._logs), NAME)


@dataclass
class RecordedRun:
    """One run of a supervisor, as its log tells it.

    Attributes:
        name: The name of the directory of its logs.
        start: The fields of its first line; empty if that line cannot be read.
        attempts: The attempts that have ended.
        messages: What the supervisor said, with the time.
        running: The fields of the newest lines of an attempt that has not ended.
        end: The fields of its last line; empty if it has none.
        last_time: The time of its newest line.
        unreadable: The lines from the first one on that is damaged.
    """

    name: str
    start: dict[str, Any] = field(default_factory=dict)
    attempts: list[AttemptEnded] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    last_time: str = ""
    unreadable: int = 0

    IDENTITY: ClassVar = ("host", "boot", "pid_namespace")

    @property
    def state(self) -> str:
        """`ended`, `running`, or `lost` if it was killed or its machine went away.

        `unknown` on another machine, in another PID namespace (a container), and after a restart of the
        machine: process IDs are others there.
        """
        if self.end:
            return "ended"
        if not self.start:
            return "unknown"
        process = describe_process(self.start["pid"])
        if any(self.start[name] != process[name] for name in self.IDENTITY):
            return "unknown"
        is_alive = process["process_start"] == self.start["process_start"]
        return "running" if is_alive else "lost"

    @property
    def longest(self) -> dict[str, float]:
        """Seconds of the longest silence in each phase."""
        longest: dict[str, float] = {}
        for ended in self.attempts:
            for phase, seconds in ended.longest.items():
                longest[phase] = max(seconds, longest.get(phase, 0.0))
        return longest

    @property
    def saved(self) -> dict[str, int]:
        """The newest step that was saved, by run directory; none if the run has finished."""
        if self.end.get("status") == 0:
            return {}
        parts = [ended.attempt.saved for ended in self.attempts]
        return {
            path: step
            for part in (*parts, self.running.get("saved", {}))
            for path, step in part.items()
        }

    @property
    def program(self) -> tuple[object, object]:
        """The command and its directory: runs with the same are restarts of one another."""
        return self.start.get("command"), self.start.get("directory")

    def summary(self) -> Summary:
        """Its attempts that have ended, with the totals; the status is -1 if it has not ended."""
        attempts = tuple(ended.attempt for ended in self.attempts)
        seconds = attempts[-1].began + attempts[-1].seconds - attempts[0].began if attempts else 0.0
        return Summary(
            tuple(self.start.get("command", ())),
            attempts,
            self.end.get("status", -1),
            self.end.get("reason", ""),
            self.end.get("seconds", seconds),
            self.start.get("logs", ""),
        )

    def take(self, event: Any) -> None:
        """Add what a line of the log tells."""
        self.last_time = event.time
        fields = msgspec.to_builtins(event)
        match event:
            case _Start():
                self.start = fields
            case _Attempt() | _Progress():
                self.running |= fields
            case AttemptEnded():
                self.attempts.append(event)
                self.running = {}
            case _Message():
                self.messages.append(fields)
            case _End():
                self.end, self.running = fields, {}


def read_runs(logs: Path) -> list[RecordedRun]:
    """The runs whose logs are in `logs` or in a directory of it, oldest first.

    Raises:
        OSError: There is a log that cannot be read.
    """
    paths = [path for path in (logs / FILE, *logs.glob(f"*/{FILE}")) if path.exists()]
    return sorted(map(_read_run, paths), key=lambda run: run.start.get("time", ""))


def _read_run(path: Path) -> RecordedRun:
    run = RecordedRun(path.parent.name)
    with open(open_regular(os.fspath(path)), "rb") as file:
        number = 0
        try:
            for line in read_lines(file, str(path)):
                run.take(line.decode(_DECODER, str(path)))
                number = line.number
        except CorruptionError:
            file.seek(0)
            run.unreadable = sum(1 for _ in file) - number
    return run


def encodable(value: Any) -> Any:
    """`value` as JSON can hold it: a path or an argument may be no text."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(each) for each in value]
    return value


def describe_process(pid: int) -> dict[str, Any]:
    """What tells a process from all others: of other machines, of other containers, of other times.

    `process_start` is in ticks since the machine started; None if there is no such process here.
    """
    process: dict[str, Any] = {"host": socket.gethostname(), "pid": pid}
    process |= {"boot": None, "pid_namespace": None, "process_start": None}
    with suppress(OSError):
        process["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        process["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
    with suppress(OSError):
        process["process_start"] = int(stat_fields(pid)[START])
    return process
