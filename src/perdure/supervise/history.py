"""The history of a run: one record for each attempt, and the totals.

A step number counts finished steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

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
    """One attempt of the group. Times are seconds of the monotonic clock.

    The names of the fields are also the keys of `attempt` in the log of a run and, most of them, of
    `--json`, so they stay. `start`, `end`, `first_step` and `last_step` are steps; `began`,
    `first_time`, `last_time` and `noticed` are times.

    Attributes:
        number: Counts from 1.
        workers: How many workers there were.
        kind: How the attempt ended; "full" is a failure for lack of space on a disk, and "corrupt" one
            of a device that an audit found to compute wrong numbers; "refused" is one of a program that
            must not begin again where it was saved.
        cause: The same for people: a status or a signal, with what the kernel says.
        place: The place of the worker that failed first; None if no single worker did.
        statuses: Exit status of each worker, -n for one that signal n ended.
        start: The step that it resumed at, if a heartbeat reported it.
        end: The newest step that any of its workers finished.
        began: When it began.
        first_time: When a heartbeat first reported a new step.
        last_time: When a heartbeat reported the newest step.
        noticed: When its end was noticed.
        seconds: Its duration.
        last_step: The last step of the worker that failed first, or of all if no single worker did.
        made_progress: Whether the worker that failed first finished a step.
        last_line: The last line that this worker wrote.
        exception: The exception of the traceback with which it exited.
        first_step: The new step that a heartbeat reported first.
        corrupt_devices: Numbers of the devices of its worker that compute wrong numbers.
        saved: The newest step that it saved, by run directory.
        devices_left: How many other devices this worker has; None if no device is wrong.
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
    saved: dict[str, int] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Summary:
    """A whole run.

    Attributes:
        command: The program and its arguments.
        attempts: All attempts in order.
        status: The exit status of `perdure run`.
        reason: Why the run ended.
        seconds: Its duration.
        log_directory: Where the logs of the workers are.
        left_behind: How many processes of the run could not be killed.
        signal: The signal that asked the run to end; None if there was none.
    """

    command: tuple[str, ...]
    attempts: tuple[AttemptRecord, ...]
    status: int
    reason: str
    seconds: float
    log_directory: str
    left_behind: int = 0
    signal: int | None = None

    @property
    def restarts(self) -> int:
        """How many attempts followed the first one."""
        return max(0, len(self.attempts) - 1)

    @property
    def repeated(self) -> tuple[int, ...]:
        """For each attempt, how many of its steps the next attempt had to repeat."""
        return tuple(
            [
                max(0, before.end - after.start)
                if before.stepped and before.end is not None and after.start is not None
                else 0
                for before, after in pairwise(self.attempts)
            ]
            + [0] * bool(self.attempts)
        )

    @property
    def recovery(self) -> tuple[float | None, ...]:
        """For each attempt, seconds from the end of the previous one to its first new step."""
        return tuple(
            [None] * bool(self.attempts)
            + [
                None if after.first_time is None else after.first_time - before.noticed
                for before, after in pairwise(self.attempts)
            ]
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step, without the first reported step of an attempt; saves count."""
        steps, seconds = 0, 0.0
        for attempt in self.attempts:
            if attempt.first_time is None or attempt.last_time is None:
                continue
            if attempt.first_step is None or attempt.end is None:
                continue
            steps += attempt.end - attempt.first_step
            seconds += attempt.last_time - attempt.first_time
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
        """The summary in plain values, as `--json` prints it."""
        attempts = []
        for attempt, repeated, recovery in zip(
            self.attempts, self.repeated, self.recovery, strict=True
        ):
            fields = asdict(attempt)
            for internal in ("began", "first_time", "first_step", "last_time", "noticed"):
                del fields[internal]
            attempts.append(
                {**fields, "repeated": repeated, "recovery_seconds": _rounded(recovery)}
                | {"seconds": _rounded(attempt.seconds)}
            )
        return {
            "command": list(self.command),
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


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
