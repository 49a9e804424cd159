"""What happened in a run: one record for each attempt, and the sums that people ask for.

Pure functions of what was seen. Steps count the finished ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

Kind = Literal[
    "done", "preempted", "failed", "killed", "hung", "stopped", "port", "resized", "ended"
]
# Those that count against max_restarts. The rest are not the program's fault, or no fault at all.
FAILURES = ("failed", "killed", "hung", "stopped", "port")


@dataclass(frozen=True)
class AttemptRecord:
    """One life of the group.

    `cause` is for people; `kind` and `place` (of the worker that was the first to fail) for the
    policy. `start` and `end` are the steps it began and ended at, as far as heartbeats told; `began`
    and `seconds` its time on the monotonic clock; `first` when it first told of a new step, which was
    `first_step`, and `last` when it told of the newest one. `statuses` has -n for a worker that signal
    n ended. Of the worker that was the first to fail: `at` is the step it was at, `alive` whether it
    got a step done, `said` the last line that it wrote.
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
    first: float | None
    last: float | None
    noticed: float
    seconds: float
    at: int | None = None
    alive: bool = False
    said: str = ""
    first_step: int | None = None

    @property
    def stepped(self) -> bool:
        """Whether it got a step done."""
        return self.first is not None

    @property
    def told(self) -> str:
        """The cause, with what the worker itself said of it."""
        return f"{self.cause}: {self.said}" if self.said else self.cause

    @property
    def failure(self) -> bool:
        """Whether it counts against the restarts."""
        return self.kind in FAILURES


@dataclass(frozen=True)
class Summary:
    """A whole run. `status` is what `perdure run` exits with; `reason` says why it ended, and `asked`
    is the signal that was sent to it for that."""

    command: tuple[str, ...]
    attempts: tuple[AttemptRecord, ...]
    status: int
    reason: str
    seconds: float
    log_directory: str
    left_behind: int = 0
    asked: int | None = None

    @property
    def restarts(self) -> int:
        """Attempts behind the first one."""
        return len(self.attempts) - 1

    @property
    def repeated(self) -> tuple[int, ...]:
        """For each attempt, the steps that the next one had to do again."""
        return (
            *(
                max(0, before.end - after.start)
                if before.stepped and before.end is not None and after.start is not None
                else 0
                for before, after in pairwise(self.attempts)
            ),
            0,
        )

    @property
    def recovery(self) -> tuple[float | None, ...]:
        """For each attempt, seconds from the end of the one before to its own first new step."""
        return (
            None,
            *(
                None if after.first is None else after.first - before.noticed
                for before, after in pairwise(self.attempts)
            ),
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step, without those of an attempt up to the first that a heartbeat told of;
        time spent in saves counts."""
        steps, seconds = 0, 0.0
        for each in self.attempts:
            if each.first is None or each.last is None:
                continue
            if each.first_step is None or each.end is None:
                continue
            steps += each.end - each.first_step
            seconds += each.last - each.first
        return seconds / steps if steps > 0 else None

    @property
    def useful(self) -> float | None:
        """Seconds of steps that stand: each step once, at the mean time of a step."""
        each = self.step_seconds
        steps = sum(
            max(0, a.end - a.start - again)
            for a, again in zip(self.attempts, self.repeated, strict=True)
            if a.start is not None and a.end is not None
        )
        return None if each is None else min(self.seconds, steps * each)

    @property
    def goodput(self) -> float | None:
        """Useful time of the whole time; None where no heartbeat told of steps."""
        return None if self.useful is None or not self.seconds else self.useful / self.seconds

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        attempts = []
        for each, repeated, recovery in zip(
            self.attempts, self.repeated, self.recovery, strict=True
        ):
            found = asdict(each)
            for inner in ("began", "first", "first_step", "last", "noticed"):
                del found[inner]
            attempts.append(
                {**found, "repeated": repeated, "recovery_seconds": _rounded(recovery)}
                | {"seconds": _rounded(each.seconds)}
            )
        return {
            "command": list(self.command),
            "status": self.status,
            "reason": self.reason,
            "attempts": attempts,
            "restarts": self.restarts,
            "failures": sum(each.failure for each in self.attempts),
            "repeated_steps": sum(self.repeated),
            "seconds": _rounded(self.seconds),
            "lost_seconds": None if self.useful is None else _rounded(self.seconds - self.useful),
            "goodput": _rounded(self.goodput),
            "log_directory": self.log_directory,
            "left_behind": self.left_behind,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
