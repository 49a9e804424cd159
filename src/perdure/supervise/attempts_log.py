"""The log of a run under `perdure run`, beside the logs of its workers: written, and read.

It has the form of every log (`perdure.store.log`). Invariant: a log that cannot be written ends no
run; what could not be written waits in memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from perdure.errors import CorruptionError, NotARunError, UnreachableError
from perdure.runtime.process_stat import START, stat_fields
from perdure.runtime.system import IS_LINUX
from perdure.store.local import LocalStorage
from perdure.store.log import LogWriter, read_lines
from perdure.store.regular_file import open_regular
from perdure.supervise.worker import remedy

NAME = "attempts"
FILE = f"{NAME}.jsonl"
DEFAULT_LOGS = "perdure-logs"
KEPT_LINES = 10_000
"""Lines that wait in memory for space on the disk."""
_DECODER = msgspec.json.Decoder(dict[str, Any])


def timestamp(seconds: float | None = None) -> str:
    """The time of day in UTC, such as `2026-01-31T23:59:59.123Z`; by default now."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Kind = Literal[
    "done",
    "preempted",
    "failed",
    "full",
    "killed",
    "hung",
    "stopped",
    "port",
    "corrupt",
    "refused",
    "resized",
    "ended",
]
# The kinds that count against max_restarts.
FAILURES = ("failed", "full", "killed", "hung", "stopped", "port", "corrupt", "refused")


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt of the group. Steps count finished steps; times are monotonic seconds.

    The fields are keys in the log and in `--json`. `kind` is how it ended ("full": no space;
    "corrupt": an audit found a wrong device; "refused": it must not begin again), `cause` the same
    for people. `place` and `last_step` are of the worker that failed first, if one did.
    `first_time` and `last_time` are when heartbeats reported `first_step` and `end`; `saved` the
    newest step by run directory, None if it was begun again on purpose.
    """

    number: int
    workers: int
    kind: Kind
    cause: str
    place: int | None
    statuses: tuple[int, ...]
    start: int | None
    end: int | None
    began: float
    first_time: float | None
    last_time: float | None
    noticed: float
    seconds: float
    last_step: int | None = None
    made_progress: bool = False
    last_line: str = ""
    exception: str = ""
    first_step: int | None = None
    corrupt_devices: tuple[int, ...] = ()
    devices_left: int | None = None
    saved: dict[str, int | None] = field(default_factory=dict)

    @property
    def stepped(self) -> bool:
        """Whether any worker finished a step."""
        return self.first_time is not None

    @property
    def explanation(self) -> str:
        """The cause with its exception; else with what the worker wrote last, about whatever it was."""
        if self.exception:
            return f"{self.cause}: {self.exception}"
        return f"{self.cause} (last line: {self.last_line})" if self.last_line else self.cause

    @property
    def failure(self) -> bool:
        """Whether it counts against the restarts."""
        return self.kind in FAILURES


@dataclass
class RunHistory:
    """What happened in one run, as the lines of its log tell it.

    `start` and `end` are the fields of its first and last line, `running` the newest of an attempt
    that has not ended, `longest` seconds of silence by phase, `unreadable` the lines from the first
    damaged one on.
    """

    name: str = ""
    start: dict[str, Any] = field(default_factory=dict)
    attempts: list[AttemptRecord] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    last_time: str = ""
    unreadable: int = 0
    left_behind: int = 0
    signal: int | None = None

    def add(self, kind: str, time: str, **fields: Any) -> None:
        """Add what one line of the log tells."""
        self.last_time = time
        event = {"time": time, **fields}
        match kind:
            case "start":
                self.start = event
            case "attempt" | "progress":
                # Each worker reports its own.
                saved = self.running.get("saved", {}) | fields.get("saved", {})
                self.running |= event | {"saved": saved}
            case "attempt_end":
                self.attempts.append(msgspec.convert(fields["attempt"], AttemptRecord))
                self.longest, self.running = fields["longest"], {}
            case "message":
                self.messages.append(event)
            case "end":
                self.end, self.running = event, {}

    @property
    def program(self) -> tuple[object, object]:
        """The command and its directory: runs with the same are restarts of one another."""
        return self.start.get("command"), self.start.get("directory")

    @property
    def status(self) -> int:
        """The exit status of `perdure run`; -1 if the run has not ended."""
        return self.end.get("status", -1)

    @property
    def reason(self) -> str:
        """Why the run ended."""
        return self.end.get("reason", "")

    @property
    def log_directory(self) -> str:
        """Where the logs of the workers are."""
        return self.start.get("logs", "")

    @property
    def seconds(self) -> float:
        """Its duration; the duration of its attempts if it has not ended."""
        if self.end or not self.attempts:
            return self.end.get("seconds", 0.0)
        last = self.attempts[-1]
        return last.began + last.seconds - self.attempts[0].began

    @property
    def state(self) -> str:
        """`ended`, `running`, or `lost` if it was killed or its machine went away.

        `unknown` where process IDs are others: another machine or container, or after a restart. So
        it is on systems without /proc.
        """
        if self.end:
            return "ended"
        if not self.start:
            return "unknown"
        process = describe_process(self.start["pid"])
        if not IS_LINUX or any(
            self.start[name] != process[name] for name in ("host", "boot", "pid_namespace")
        ):
            return "unknown"
        is_alive = process["process_start"] == self.start["process_start"]
        return "running" if is_alive else "lost"

    @property
    def saved(self) -> dict[str, int | None]:
        """The newest step that was saved, by run directory; see `AttemptRecord`."""
        parts = [*(attempt.saved for attempt in self.attempts), self.running.get("saved", {})]
        return {path: step for part in parts for path, step in part.items()}

    @property
    def restarts(self) -> int:
        """How many attempts followed the first one."""
        return max(0, len(self.attempts) - 1)

    @property
    def repeated(self) -> tuple[int, ...]:
        """For each attempt, how many of its steps the next attempt had to repeat."""
        found = [0] * len(self.attempts)
        for number, (before, after) in enumerate(pairwise(self.attempts)):
            if before.stepped and before.end is not None and after.start is not None:
                found[number] = max(0, before.end - after.start)
        return tuple(found)

    @property
    def recovery(self) -> tuple[float | None, ...]:
        """For each attempt, seconds from the end of the previous one to its first new step."""
        found: list[float | None] = [None] * len(self.attempts)
        for number, (before, after) in enumerate(pairwise(self.attempts), 1):
            if after.first_time is not None:
                found[number] = after.first_time - before.noticed
        return tuple(found)

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step, without the first reported step of an attempt; saves count."""
        steps, seconds = 0, 0.0
        for attempt in self.attempts:
            if None not in (attempt.first_step, attempt.first_time, attempt.last_time):
                steps += (attempt.end or 0) - (attempt.first_step or 0)
                seconds += (attempt.last_time or 0.0) - (attempt.first_time or 0.0)
        return seconds / steps if steps > 0 else None

    @property
    def useful(self) -> float | None:
        """Seconds of useful steps: each step once, at the mean time of a step."""
        step_seconds = self.step_seconds
        steps = sum(
            max(0, a.end - a.start - repeated)
            for a, repeated in zip(self.attempts, self.repeated, strict=True)
            if a.start is not None and a.end is not None
        )
        return None if step_seconds is None else min(self.seconds, steps * step_seconds)

    @property
    def goodput(self) -> float | None:
        """Useful share of the whole time; None if no heartbeat reported steps."""
        return None if self.useful is None or not self.seconds else self.useful / self.seconds

    def document(self) -> dict[str, Any]:
        """The totals and the attempts in plain values, as `--json` prints them."""
        attempts = []
        for attempt, repeated, recovery in zip(
            self.attempts, self.repeated, self.recovery, strict=True
        ):
            fields = asdict(attempt)
            for internal in ("first_time", "first_step", "last_time", "noticed"):
                del fields[internal]
            fields |= {"repeated": repeated, "recovery_seconds": _rounded(recovery)}
            fields |= {"explanation": attempt.explanation, "seconds": _rounded(attempt.seconds)}
            attempts.append(fields | {"began": _rounded(attempt.began - self.attempts[0].began)})
        return {
            "command": list(self.start.get("command", ())),
            "status": self.status,
            "reason": self.reason,
            "attempts": attempts,
            "restarts": self.restarts,
            "failures": sum(attempt.failure for attempt in self.attempts),
            "repeated_steps": sum(self.repeated),
            "seconds": _rounded(self.seconds),
            "lost_seconds": None if self.useful is None else _rounded(self.seconds - self.useful),
            "goodput": _rounded(self.goodput),
            "log_directory": self.log_directory,
            "left_behind": self.left_behind,
        }

    def history(self) -> dict[str, Any]:
        """The document as the log tells it, with where, when and how far the run was."""
        totals = self.document()
        del totals["left_behind"]  # which no log tells
        totals |= {name: self.end.get(name) for name in ("status", "reason")}
        start = {name: self.start.get(name) for name in ("host", "pid", "directory", "workers")}
        return {
            "name": self.name,
            "state": self.state,
            "started": self.start.get("time"),
            "last_time": self.last_time,
            **start,
            **totals,
            "running": self.running or None,
            "messages": [{"time": m["time"], "text": m.get("text")} for m in self.messages],
        }


class AttemptsLog:
    """Writes the log of one run; `report` is called once with a message if it cannot be written."""

    def __init__(self, logs: Path, report: Callable[[str], None]) -> None:
        self.run = RunHistory(logs.name)
        self._logs = logs
        self._report = report
        self._writer: LogWriter | None = None
        self._waiting: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        self._was_reported = False

    def add(self, kind: str, **fields: Any) -> None:
        """Append one event with the time of day; if the disk is full, later events write it too."""
        event = {"kind": kind, "time": timestamp(), **encodable(fields)}
        self.run.add(**event)
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
        if self.run.start and self._waiting[0]["kind"] != "start":
            self._waiting.appendleft({"kind": "start", **self.run.start})
        self._logs.mkdir(parents=True, exist_ok=True)
        self._writer = LogWriter(LocalStorage(self._logs), NAME)


def read_runs(logs: Path) -> list[RunHistory]:
    """The runs whose logs are in `logs` or in a directory of it, oldest first."""
    paths = [path for path in (logs / FILE, *logs.glob(f"*/{FILE}")) if path.is_file()]
    return sorted(map(_read_run, paths), key=lambda run: run.start.get("time", ""))


def runs_at(path: Path) -> tuple[Path, list[RunHistory]]:
    """The directory and the runs of the logs that a person names, perhaps by a log in it.

    Raises NotARunError if there is no log, UnreachableError if one cannot be read.
    """
    where = path if path.is_dir() else path.parent
    try:
        runs = read_runs(where)
    except OSError as error:
        raise UnreachableError(
            f"{where}: a log of `perdure run` cannot be read: {error}."
        ) from error
    if not runs:
        raise NotARunError(
            f"{path}: expected the log directory of `perdure run`, with {FILE} in it or in a directory "
            f"of it, found none. Name that of its --log-dir, by default {DEFAULT_LOGS} where it began."
        )
    return where, runs


def _read_run(path: Path) -> RunHistory:
    run = RunHistory(path.parent.name)
    with open(open_regular(os.fspath(path)), "rb") as file:
        number = 0
        try:
            for line in read_lines(file, str(path)):
                run.add(**line.decode(_DECODER, str(path)))
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
    """What tells a process from all others: of other machines, of other containers, of other times."""
    process: dict[str, Any] = {"host": socket.gethostname(), "pid": pid}
    process |= {"boot": None, "pid_namespace": None, "process_start": None}
    with suppress(OSError):
        process["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        process["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
    with suppress(OSError):
        process["process_start"] = int(stat_fields(pid)[START])
    return process


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
