"""The life of a run: the starts and attempts that the logs of `perdure run` have of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure.errors import NotARunError, UnreachableError
from perdure.store import Run
from perdure.store.local import LocalStorage
from perdure.supervise.attempts_log import DEFAULT_LOGS, FILE, RunHistory, read_runs


def find_life(run: Run, logs: Sequence[Path]) -> dict[str, Any] | None:
    """The life of a run in plain values: the totals, and each start with its attempts.

    It is that of the program that saved checkpoints in this run directory, or in one of the same name
    if none did; of a run without a checkpoint the newest program in `logs`. None if there is none.

    Args:
        run: The run.
        logs: Log directories of `perdure run`. If none is given, `perdure-logs` is looked for in
            the run directory, in the two directories above it, and in the working directory.

    Raises:
        NotARunError: One of `logs` has no log of `perdure run`.
        UnreachableError: One of `logs` cannot be read.
    """
    least = 0 if logs and not run.steps() else 1
    best: tuple[int, str] = least, ""
    life: dict[str, Any] | None = None
    for path in [_given(path) for path in logs] or _near(run):
        try:
            starts = read_runs(path)
        except OSError as error:
            if not logs:
                continue
            raise UnreachableError(f"{path}: a log cannot be read: {error}.") from error
        for program in dict.fromkeys(str(start.program) for start in starts):
            mine = [start for start in starts if str(start.program) == program]
            rank = max(_match(start, run.where) for start in mine), mine[-1].last_time
            if rank >= best:
                best, life = rank, _document(path, mine, sum(each.unreadable for each in starts))
    return life


def _match(start: RunHistory, where: str) -> int:
    """2 if a start saved in this run directory, 1 if it did in one of the same name."""
    parts = [start.running.get("saved", {}), *(attempt.saved for attempt in start.attempts)]
    saved = {
        os.path.realpath(path) if "://" not in path else path for part in parts for path in part
    }
    if (where if "://" in where else os.path.realpath(where)) in saved:
        return 2
    return int(os.path.basename(where) in map(os.path.basename, saved))


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


def _together(starts: Sequence[RunHistory]) -> RunHistory:
    """One history of all starts, so that steps repeated from one to the next count, too."""
    seconds = sum(start.seconds for start in starts)
    attempts = [attempt for start in starts for attempt in start.attempts]
    return RunHistory(start=starts[-1].start, attempts=attempts, end={"seconds": seconds})


def _document(logs: Path, starts: Sequence[RunHistory], unreadable: int) -> dict[str, Any]:
    total = _together(starts)
    repeated = iter(total.repeated)
    rows = []
    for start in starts:
        attempts = []
        for attempt in start.attempts:
            names = ("number", "workers", "kind", "cause", "explanation", "start", "end")
            fields = {name: getattr(attempt, name) for name in names}
            began = round(attempt.began - start.attempts[0].began, 3)
            seconds = round(attempt.seconds, 3)
            fields |= {"repeated": next(repeated), "began": began, "seconds": seconds}
            attempts.append(fields)
        rows.append(
            {
                "name": start.name,
                "state": start.state,
                "status": start.end.get("status"),
                "reason": start.end.get("reason"),
                "started": start.start.get("time"),
                "last_time": start.last_time,
                "host": start.start.get("host"),
                "directory": start.start.get("directory"),
                "seconds": round(start.seconds, 3),
                "attempts": attempts,
                "running": start.running or None,
            }
        )
    return {
        "record": str(logs),
        "unreadable_lines": unreadable,
        "command": list(total.start.get("command", ())),
        "attempts": len(total.attempts),
        "repeated_steps": sum(total.repeated),
        "seconds": round(total.seconds, 3),
        "lost_seconds": None if total.useful is None else round(total.seconds - total.useful, 3),
        "goodput": None if total.goodput is None else round(total.goodput, 3),
        "starts": rows,
    }
