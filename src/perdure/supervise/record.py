"""`RunRecord`: what happens in a run, as lines of JSON that are on the disk at once.

Lines are only appended, each with one system call. Invariant: a line that a full disk or a crash has
cut off spoils no other: the next one begins on a line of its own, and a reader skips and counts it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from perdure.process_stat import START, stat_fields
from perdure.supervise.history import AttemptRecord, Summary
from perdure.supervise.run_file import create_file, open_file, remedy
from perdure.supervise.value_types import has_type

RECORD = "record.jsonl"
KEPT_LINES = 10_000
"""Lines that wait in memory for space on the disk."""
FIELD_TYPES = get_type_hints(AttemptRecord) | {
    "attempt": int,
    "boot": str | None,
    "command": list[str],
    "directory": str,
    "host": str,
    "logs": str,
    "longest": dict[str, float],
    "phase": str,
    "pid": int,
    "pid_namespace": int | None,
    "process_start": int | None,
    "reason": str,
    "saved": dict[str, int],
    "status": int,
    "step": int,
    "text": str,
}
"""The types of the fields of all events; a field has the same type in each."""


def timestamp(seconds: float | None = None) -> str:
    """The time of day in UTC, such as `2026-01-31T23:59:59.123Z`; by default now."""
    seconds = time.time() if seconds is None else seconds
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


class RunRecord:
    """Appends the events of one run to a file, which may hold those of earlier runs.

    Args:
        path: The file; a link is not followed.
        run: The name of the run, which is in every line.
        report: Is called once with a message if the file cannot be written.
    """

    def __init__(self, path: Path, run: str, report: Callable[[str], None]) -> None:
        self._path = path
        self._run = run
        self._report = report
        self._waiting: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._was_reported = False
        self._is_torn = _ends_torn(path)

    def add(self, event: str, **fields: Any) -> None:
        """Append one event with the time of day; if the disk is full, later events write it too."""
        line = {"time": timestamp(), "run": self._run, "event": event, **fields}
        self._waiting.append(json.dumps(line, default=str).encode() + b"\n")
        try:
            file = create_file(self._path, os.O_APPEND)
            try:
                while self._waiting:
                    data = (b"\n" if self._is_torn else b"") + self._waiting[0]
                    written = os.write(file, data)
                    self._is_torn = written < len(data)
                    if not self._is_torn:
                        self._waiting.popleft()
            finally:
                os.close(file)
        except OSError as error:
            if not self._was_reported:
                self._was_reported = True
                self._report(
                    f"{self._path}: the record of the run cannot be written: {error}; the run "
                    "continues, and what is missing is added once the record can be written again: "
                    f"{remedy(error, self._path)}"
                )


@dataclass
class RecordedRun:
    """One run of a supervisor, as its record tells it.

    Attributes:
        name: Its name in the record.
        start: The fields of its first line; empty if that line is unreadable.
        attempts: The fields of each attempt that has ended.
        messages: What the supervisor said, with the time.
        running: The fields of the newest line of an attempt that has not ended.
        end: The fields of its last line; empty if it has none.
        last_time: The time of its newest line.
    """

    name: str
    start: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    last_time: str = ""

    @property
    def state(self) -> str:
        """`ended`, `running`, or `lost` if it was killed or its machine went away.

        `unknown` on another machine, in another PID namespace (a container), and after a restart of the
        machine: process IDs are others there.
        """
        if self.end:
            return "ended"
        pid = self.start.get("pid")
        if pid is None:
            return "unknown"
        process = describe_process(pid)
        if any(self.start.get(name) != process[name] for name in ("host", "boot", "pid_namespace")):
            return "unknown"
        is_alive = process["process_start"] == self.start.get("process_start")
        return "running" if is_alive else "lost"

    @property
    def longest(self) -> dict[str, float]:
        """Seconds of the longest silence in each phase."""
        longest: dict[str, float] = {}
        for attempt in self.attempts:
            for phase, seconds in attempt.get("longest", {}).items():
                longest[phase] = max(seconds, longest.get(phase, 0.0))
        return longest

    @property
    def saved(self) -> dict[str, int]:
        """The newest step that was saved, by run directory; none if the run has finished."""
        if self.end.get("status") == 0:
            return {}
        parts = [fields.get("saved", {}) for fields in (*self.attempts, self.running)]
        return {path: step for part in parts for path, step in part.items()}

    @property
    def program(self) -> tuple[object, object]:
        """The command and its directory: runs with the same are restarts of one another."""
        return self.start.get("command"), self.start.get("directory")

    def summary(self) -> Summary:
        """Its attempts that have ended, with the totals; the status is -1 if it has not ended."""
        names = {field.name for field in fields(AttemptRecord)}
        required = {
            field.name
            for field in fields(AttemptRecord)
            if field.default is MISSING and field.default_factory is MISSING
        }
        attempts = tuple(
            AttemptRecord(**{name: value for name, value in attempt.items() if name in names})
            for attempt in self.attempts
            if required <= attempt.keys()  # all but those of another version of perdure
        )
        seconds = attempts[-1].began + attempts[-1].seconds - attempts[0].began if attempts else 0.0
        return Summary(
            tuple(self.start.get("command", ())),
            attempts,
            self.end.get("status", -1),
            self.end.get("reason", ""),
            self.end.get("seconds", seconds),
            self.start.get("logs", ""),
        )


def read_record(path: Path) -> tuple[list[RecordedRun], int]:
    """The runs in a record, oldest first, and how many lines cannot be read.

    A field that has another type than in `FIELD_TYPES` is left out, and its line counts as unreadable.
    """
    runs: dict[str, RecordedRun] = {}
    unreadable = 0
    for line in _lines(path):
        if line is None:
            unreadable += 1
            continue
        fields = {
            name: value
            for name, value in line.items()
            if name not in FIELD_TYPES or has_type(value, FIELD_TYPES[name])
        }
        unreadable += len(fields) < len(line)
        run = runs.setdefault(fields["run"], RecordedRun(fields["run"]))
        event = fields["event"]
        run.last_time = max(run.last_time, fields["time"])
        if event == "start":
            run.start = fields
        elif event in ("attempt", "progress"):
            run.running |= fields
        elif event == "attempt_end":
            run.attempts.append(fields)
            run.running = {}
        elif event == "message":
            run.messages.append(fields)
        elif event == "end":
            run.end = fields
            run.running = {}
    return list(runs.values()), unreadable


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


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    with open_file(path) as file:
        for line in file:
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):  # thousands of brackets in one another
                fields = None
            is_event = isinstance(fields, dict) and all(
                isinstance(fields.get(name), str) for name in ("run", "event", "time")
            )
            yield fields if is_event else None


def _ends_torn(path: Path) -> bool:
    try:
        with open_file(path) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                return file.read() != b"\n"
    except OSError:
        pass
    return False
