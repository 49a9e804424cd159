"""The life of a run: the starts and attempts that the record of `perdure run` has of it.

A record does not name the run directory that its program wrote, so they are matched by time: the
starts of the program in whose attempts the most of the checkpoints were saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from perdure.errors import NotARunError, UnreachableError
from perdure.store import LocalStorage, Run
from perdure.supervise.history import Summary
from perdure.supervise.record import FILE, RecordedRun, read_runs
from perdure.supervise.supervisor import DEFAULT_LOGS

_SLACK_S = 2.0
"""Checkpoints have whole seconds, and the record is written shortly after an attempt has ended."""


@dataclass(frozen=True)
class RecordedLife:
    """The starts of one program, oldest first, and the totals over all of them.

    Attributes:
        record: The directory of its logs.
        starts: The starts of `perdure run` with the same command in the same directory.
        unreadable: How many lines of its logs cannot be read.
        summary: Attempts and totals of all starts together.
    """

    record: Path
    starts: Sequence[RecordedRun]
    unreadable: int
    summary: Summary


def find_life(run: Run, logs: Sequence[Path], saved: Sequence[float]) -> RecordedLife | None:
    """The life of a run; None if no record has a start in which a checkpoint of it was saved.

    Of a run without a checkpoint it is the newest program in `logs`.

    Args:
        run: The run.
        logs: Log directories of `perdure run`, or records. If none is given, `perdure-logs` is looked
            for in the run directory, in the two directories above it, and in the working directory.
        saved: When its checkpoints were saved, in seconds since 1970.

    Raises:
        NotARunError: One of `logs` has no record.
        UnreachableError: One of `logs` cannot be read.
    """
    candidates = [_given(path) for path in logs] or _near(run)
    least = 0 if logs and not saved else 1
    best: tuple[int, float, RecordedLife] | None = None
    for path in candidates:
        try:
            runs = read_runs(path)
        except OSError as error:
            if not logs:
                continue
            raise UnreachableError(f"{path}: a log cannot be read: {error}.") from error
        for _, group in groupby(sorted(runs, key=_program), _program):
            starts = sorted(group, key=lambda start: str(start.start.get("time")))
            covered = sum(any(_covers(start, time) for start in starts) for time in saved)
            rank = covered, max((_seconds(start.last_time) for start in starts), default=0.0)
            if covered >= least and (best is None or rank > best[:2]):
                unreadable = sum(run.unreadable for run in runs)
                best = *rank, RecordedLife(path, starts, unreadable, _together(starts))
    return None if best is None else best[2]


def _given(path: Path) -> Path:
    """The log directory that was named, perhaps by its log."""
    where = path if path.is_dir() else path.parent
    if _has_logs(where):
        return where
    raise NotARunError(
        f"{path}: expected the log directory of `perdure run`, with {FILE} in it or in a directory of "
        "it, found none. Name the directory that was given to its --log-dir."
    )


def _near(run: Run) -> list[Path]:
    """`perdure-logs` around the run directory and in the working directory."""
    places: list[Path] = []
    with suppress(OSError):  # the working directory was removed
        places = [Path.cwd()]
    if isinstance(run.storage, LocalStorage):
        where = Path(run.where)
        places = [where, where.parent, where.parent.parent, *places]
    return [
        logs for logs in dict.fromkeys(place / DEFAULT_LOGS for place in places) if _has_logs(logs)
    ]


def _has_logs(where: Path) -> bool:
    return os.path.isfile(where / FILE) or any(map(os.path.isfile, where.glob(f"*/{FILE}")))


def _program(run: RecordedRun) -> str:
    return str(run.program)


def _covers(run: RecordedRun, time: float) -> bool:
    """Whether `time` lies in this start, whose end is its newest line."""
    began = _seconds(run.start.get("time", "")) or min(
        (_seconds(ended.time) - ended.attempt.seconds for ended in run.attempts),
        default=float("inf"),
    )
    ended = float("inf") if run.state == "running" else _seconds(run.last_time)
    return began - _SLACK_S <= time <= ended + _SLACK_S


def _seconds(text: str) -> float:
    """Seconds since 1970 of a time in a record; 0 for what is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _together(starts: Sequence[RecordedRun]) -> Summary:
    """One summary of all starts, so that steps repeated from one to the next count, too."""
    summaries = [start.summary() for start in starts]
    attempts = tuple(attempt for summary in summaries for attempt in summary.attempts)
    newest = summaries[-1]
    return Summary(
        newest.command,
        attempts,
        newest.status,
        newest.reason,
        sum(summary.seconds for summary in summaries),
        newest.log_directory,
    )


def life_document(life: RecordedLife) -> dict[str, Any]:
    """A life in plain values: the totals, and each start with its attempts."""
    total = life.summary
    repeated = iter(total.repeated)
    starts = []
    for start in life.starts:
        summary = start.summary()
        attempts = [
            {
                "number": attempt.number,
                "workers": attempt.workers,
                "kind": attempt.kind,
                "cause": attempt.cause,
                "last_line": attempt.last_line,
                "start": attempt.start,
                "end": attempt.end,
                "repeated": next(repeated),
                "began": round(attempt.began - summary.attempts[0].began, 3),
                "seconds": round(attempt.seconds, 3),
            }
            for attempt in summary.attempts
        ]
        starts.append(
            {
                "name": start.name,
                "state": start.state,
                "status": start.end.get("status"),
                "reason": start.end.get("reason"),
                "started": start.start.get("time"),
                "last_time": start.last_time,
                "host": start.start.get("host"),
                "directory": start.start.get("directory"),
                "seconds": round(summary.seconds, 3),
                "attempts": attempts,
                "running": start.running or None,
            }
        )
    return {
        "record": str(life.record),
        "unreadable_lines": life.unreadable,
        "command": list(total.command),
        "attempts": len(total.attempts),
        "repeated_steps": sum(total.repeated),
        "seconds": round(total.seconds, 3),
        "lost_seconds": None if total.useful is None else round(total.seconds - total.useful, 3),
        "goodput": None if total.goodput is None else round(total.goodput, 3),
        "starts": starts,
    }
