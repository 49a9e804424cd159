"""`perdure status [LOG_DIR]`: what `perdure run` recorded about a run, also while it is under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from perdure.cli.options import EXIT_STATUS, command
from perdure.cli.output import document, say, table
from perdure.errors import NotARunError, UnreachableError
from perdure.supervise.attempts_log import DEFAULT_LOGS, FILE, RunHistory, read_runs
from perdure.text import counted


@command("status", epilog=EXIT_STATUS)
@click.argument(
    "logs", metavar="LOG_DIR", required=False, default=DEFAULT_LOGS, type=click.Path(path_type=Path)
)
def status(logs: Path, as_json: bool) -> None:
    """Show the attempts, causes and steps of the newest `perdure run`, and of its earlier starts.

    LOG_DIR is its --log-dir, by default perdure-logs, or one of the directories in it.

    \b
    Example:
      perdure status perdure-logs
    """
    path = logs if logs.is_dir() else logs.parent
    runs = _read(path)
    unreadable = sum(run.unreadable for run in runs)
    if as_json:
        rows = [_document(run) for run in runs]
        document({"logs": str(path), "unreadable_lines": unreadable, "starts": rows})
        return
    for run in runs:
        _print(run)
    if unreadable:
        text = f"{counted(unreadable, 'line')} cannot be believed: a log was changed or damaged"
        say(f"{path}: {text}")


def _read(logs: Path) -> list[RunHistory]:
    """The newest run in `logs`, after the earlier runs of the same program."""
    try:
        runs = read_runs(logs)
    except OSError as error:
        raise UnreachableError(
            f"{logs}: a log of `perdure run` cannot be read: {error}."
        ) from error
    if not runs:
        raise NotARunError(
            f"{logs}: expected the log directory of `perdure run`, with {FILE} in it or in a directory "
            f"of it, found none. Name the directory that was given to --log-dir; without it the logs "
            f"are in {DEFAULT_LOGS} of the directory where `perdure run` was started."
        )
    return [run for run in runs if run.program == runs[-1].program]


def _print(run: RunHistory) -> None:
    start = run.start
    say(f"run      {run.name}  {' '.join(start.get('command', []))}")
    place = f"{start.get('host')}, process {start.get('pid')}, in {start.get('directory')}"
    say(f"started  {start.get('time', 'unknown')} on {place}")
    say(f"logs     {start.get('logs')}")
    say(f"state    {_state(run)}")
    rows: list[tuple[object, ...]] = [
        (
            *(attempt.number, attempt.workers),
            "-" if attempt.start is None else f"{attempt.start}-{attempt.end}",
            *(again, round(attempt.seconds, 1), attempt.cause),
        )
        for attempt, again in zip(run.attempts, run.repeated, strict=True)
    ]
    if now := run.running:
        recorded = f"has not ended; step {now.get('step', 'none yet')}, recorded {now['time']}"
        rows.append((now.get("attempt"), now.get("workers"), None, None, None, recorded))
    if rows:
        table(("attempt", "workers", "steps", "repeated", "s", "ended by"), rows)
    if run.goodput is not None:
        say(f"goodput  {run.goodput:.3f}, {counted(sum(run.repeated), 'step')} repeated")
    say("")


def _state(run: RunHistory) -> str:
    if run.state == "ended":
        return (
            f"ended {run.end['time']} with status {run.end.get('status')}: {run.end.get('reason')}"
        )
    if run.state == "lost":
        return f"ended without a word after {run.last_time}: killed, or the machine went down"
    if run.state == "unknown":
        return (
            f"not ended by {run.last_time}; ask on its machine, and in its container, whether it runs "
            "(after a restart of the machine it does not)"
        )
    return "running"


def _document(run: RunHistory) -> dict[str, Any]:
    totals = run.document()
    # What the log of a run that has not ended does not tell.
    for name in ("status", "reason", "left_behind"):
        totals.pop(name)
    start = {name: run.start.get(name) for name in ("host", "pid", "directory", "workers")}
    return {
        "name": run.name,
        "state": run.state,
        "started": run.start.get("time"),
        "last_time": run.last_time,
        "status": run.end.get("status"),
        "reason": run.end.get("reason"),
        **start,
        **totals,
        "running": run.running or None,
        "messages": [{"time": m["time"], "text": m.get("text")} for m in run.messages],
    }
