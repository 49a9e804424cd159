"""The part of a report on the life of a run: starts, attempts, causes, repeated steps and goodput."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.report.html_page import (
    Html,
    badge,
    code,
    duration,
    facts,
    joined,
    note,
    table,
)
from perdure.report.timeline import Bar, Line, Mark, timeline
from perdure.text import counted

_STATES = {"ended": "plain", "running": "good", "lost": "bad", "unknown": "warn"}
_MOST_STARTS = 50
_WORDS = {
    "lost": "ended without a word",
    "unknown": "not known here whether it runs",
}


def life_part(life: Mapping[str, Any] | None) -> Html:
    """The timeline and the table of attempts; a remark if there is no record."""
    if life is None:
        return note(
            "No record of perdure run covers these checkpoints. Start the program with perdure run, or "
            "name its log directory with --logs."
        )
    unread = life["unreadable_lines"]
    starts = life["starts"][-_MOST_STARTS:]
    earlier = len(life["starts"]) - len(starts)
    return joined(
        [
            facts({"command": code(shlex.join(life["command"])), "record": code(life["record"])}),
            timeline([_line(start) for start in starts], "an interruption"),
            _attempts(starts),
            note(f"{earlier} earlier starts are not shown; --json has them.") if earlier else None,
            note(f"{counted(unread, 'line')} of the record cannot be read.") if unread else None,
        ]
    )


def interruptions(life: Mapping[str, Any] | None) -> list[int]:
    """The steps at which attempts ended that another one had to follow."""
    attempts = [a for start in (life["starts"] if life else ()) for a in start["attempts"]]
    return [a["end"] for a in attempts[:-1] if a["end"] is not None and a["kind"] != "done"]


def goodput(life: Mapping[str, Any]) -> str:
    """The goodput in percent; a dash if no step was timed."""
    return "-" if life["goodput"] is None else f"{100 * life['goodput']:.1f} %"


def _line(start: Mapping[str, Any]) -> Line:
    bars, marks = [], []
    for attempt in start["attempts"]:
        steps = _steps(attempt)
        title = f"attempt {attempt['number']}: {steps}; {attempt['cause']}"
        bars.append(Bar(attempt["began"], attempt["seconds"], steps, title))
        if attempt["kind"] != "done":
            end = attempt["began"] + attempt["seconds"]
            marks.append(Mark(end, f"attempt {attempt['number']}: {attempt['cause']}"))
    state = start["state"]
    kind = _STATES[state]
    if state == "ended" and start["status"] != 0:
        kind = "warn"
    elif state == "ended":
        kind = "good"
    return Line(str(start["started"] or start["name"])[:19].replace("T", " "), kind, bars, marks)


def _steps(attempt: Mapping[str, Any]) -> str:
    if attempt["start"] is None:
        return "no step"
    return f"{attempt['start']}\N{EN DASH}{attempt['end']}"


def _attempts(starts: Sequence[Mapping[str, Any]]) -> Html:
    head = ["started", "attempt", "workers", "steps", "repeated", "took", "ended by"]
    rows: list[list[object]] = []
    for start in starts:
        began = str(start["started"] or "-")[:19].replace("T", " ")
        for number, attempt in enumerate(start["attempts"]):
            why = attempt["cause"]
            if attempt["last_line"]:
                why = f"{why}: {attempt['last_line']}"
            rows.append(
                [
                    "" if number else began,
                    attempt["number"],
                    attempt["workers"],
                    _steps(attempt),
                    attempt["repeated"],
                    duration(attempt["seconds"]),
                    why,
                ]
            )
        if start["state"] != "ended":
            running = start["running"] or {}
            step = f"step {running['step']}" if "step" in running else ""
            state = badge(_WORDS.get(start["state"], "runs"), _STATES[start["state"]])
            place = "" if start["attempts"] else began
            number, workers = running.get("attempt", ""), running.get("workers", "")
            rows.append([place, number, workers, step, "", "", state])
    return table(head, rows, "Attempts", right=("took",))
