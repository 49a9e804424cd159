"""The result of a drill as a page and as a part of a report: the verdict, then its evidence."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.drill.text_report import describe_fired, restored_text, verdict
from perdure.report.html_page import (
    Html,
    badge,
    code,
    duration,
    facts,
    fingerprint,
    joined,
    page,
    section,
    table,
    tag,
)
from perdure.report.timeline import Bar, Line, Mark, timeline
from perdure.text import counted

_KINDS = {"pass": "good", "differs": "bad", "failed": "bad", "not fired": "warn"}


def render_html(document: Mapping[str, Any]) -> str:
    """The page of `DrillReport.document()`."""
    heading = joined(
        [
            tag("p", "perdure drill", class_="kicker"),
            tag("h1", code(shlex.join(document["command"]))),
        ]
    )
    return page("perdure drill", [drill_verdict(document), heading, *_parts(document, 2)])


def drill_section(document: Mapping[str, Any]) -> Html:
    """The same as a part of a report."""
    heading = f"Drill: {shlex.join(document['command'])}"
    return section(heading, drill_verdict(document), *_parts(document, 3))


def drill_verdict(document: Mapping[str, Any]) -> Html:
    """The verdict in one line."""
    return tag("p", verdict(document), class_=f"verdict {'good' if document['pass'] else 'bad'}")


def _parts(document: Mapping[str, Any], level: int) -> list[Html]:
    parts = [_facts(document)]
    plain = document["undisturbed"]
    if plain["difference"]:
        parts.append(section("Two undisturbed runs differ", _explanation(plain), level=level))
    for run in document["runs"]:
        if run["verdict"] in ("differs", "failed"):
            heading = f"Run {run['run']}: {describe_fired(run['fired'], run['faults'])}"
            parts.append(section(heading, _explanation(run), level=level))
    if document["faults"]:
        rows = [
            [kind, counts["runs"], counts["fired"], counts["restored"], counts["pass"]]
            for kind, counts in sorted(document["faults"].items())
        ]
        head = ["fault", "runs", "fired", "restored", "same bits"]
        parts.append(section("Faults", table(head, rows, "Faults"), level=level))
    if document["not_tested"]:
        rows = [[kind, why] for kind, why in sorted(document["not_tested"].items())]
        not_tested = table(["fault", "why"], rows, "Faults that were not tested")
        parts.append(section("Not tested", not_tested, level=level))
    limits = tag("ul", *[tag("li", limit) for limit in document["limits"]])
    parts.append(section("Limits", limits, level=level))
    if document["runs"]:
        parts.append(section("Timeline", _timeline(document["runs"]), level=level))
        parts.append(section("Runs", _runs(document["runs"]), level=level))
    return parts


def _facts(document: Mapping[str, Any]) -> Html:
    """What was run, when, where and on what."""
    plain = document["undisturbed"]
    return facts(
        {
            "date": document["date"],
            "duration": duration(document["seconds"]),
            "host": document["host"],
            "versions": _pairs(document["versions"]),
            "recipe": _pairs(document["recipe"]),
            "workers, seed": f"{document['workers']}, {document['seed']}",
            "undisturbed": (
                f"{counted(plain['steps'], 'step')} reported, "
                f"{counted(plain['checkpoints'], 'checkpoint')}, {plain['seconds']:.2f} s"
            ),
            "fingerprint": code(plain["fingerprint"] or "-"),
            "restores": restored_text(document),
        }
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items())) or "-"


def _timeline(runs: Sequence[Mapping[str, Any]]) -> Html:
    """One line for each run: its attempts as bars, and the faults on them."""
    lines = []
    for run in runs:
        attempts = run["attempts"]
        bars = [
            Bar(
                attempt["began_s"],
                attempt["seconds"],
                _origin(attempt),
                f"{_origin(attempt)}; {_again(attempt)}; ended: {attempt['ended']}",
            )
            for attempt in attempts
        ]
        marks = [
            Mark(fault["at_s"], fault["what"])
            for attempt in attempts
            for fault in attempt["faults"]
        ]
        lines.append(Line(f"{run['run']} {run['kind']}", _KINDS[run["verdict"]], bars, marks))
    return timeline(lines, "a fault")


def _origin(attempt: Mapping[str, Any]) -> str:
    return f"from step {attempt['restored']}" if attempt["restored"] else "from the beginning"


def _again(attempt: Mapping[str, Any]) -> str:
    span = attempt["recomputed"]
    if not span:
        return "no step again"
    return f"step {span[0]} again" if span[0] == span[1] else f"steps {span[0]} to {span[1]} again"


def _runs(runs: Sequence[Mapping[str, Any]]) -> Html:
    head = [
        "run",
        "verdict",
        "fault",
        "where it hit",
        "attempts",
        "repeated",
        "lost s",
        "fingerprint",
    ]
    rows = [
        [
            run["run"],
            badge(run["verdict"], _KINDS[run["verdict"]]),
            f"{run['kind']}: {run['place']}" if run["place"] else run["kind"],
            describe_fired(run["fired"], run["faults"]),
            "; ".join(f"{_origin(a)}, {_again(a)} ({a['ended']})" for a in run["attempts"]),
            run["repeated_steps"],
            run["lost_seconds"],
            fingerprint(run["fingerprint"]),
        ]
        for run in runs
    ]
    return table(head, rows, "Runs of the drill")


def _explanation(result: Mapping[str, Any]) -> Html:
    parts: list[Html] = []
    if difference := result["difference"]:
        parts.append(tag("p", f"First difference: {difference['what']}"))
        rows = [
            [code(leaf["path"]), leaf["expected"], leaf["found"]] for leaf in difference["leaves"]
        ]
        if rows:
            parts.append(table(["leaf", "expected", "found"], rows, "Leaves that differ"))
    if result.get("problem"):
        parts.append(tag("p", result["problem"]))
        parts.append(tag("pre", result["log"]))
    if diagnosis := result["diagnosis"]:
        cause = tag("strong", f"Cause: {diagnosis['what']}")
        parts.append(tag("p", cause, f" ({diagnosis['cause']})"))
        parts.append(tag("ul", *[tag("li", line) for line in diagnosis["evidence"]]))
        parts.append(tag("p", f"To repair it: {diagnosis['advice']}"))
    return joined(parts)
