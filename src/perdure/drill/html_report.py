"""The report of a drill as one HTML file that needs no other file: the verdict, then its evidence."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from perdure.drill.text_report import describe_fired, restored_text, verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
table.facts th { width: 10rem; font-weight: 500 } td { overflow-wrap: anywhere }
code, pre { font: .85rem ui-monospace, monospace } pre { background: #f5f5f5; padding: .6rem;
       overflow-x: auto }
.pass { color: #116329 } .differs, .failed { color: #b42318; font-weight: 600 }
.not-fired { color: #8a5a00 } .verdict { font-size: 1.1rem; padding: .6rem; background: #f5f5f5 }
.run { display: grid; grid-template-columns: 13rem 1fr; gap: .8rem; margin: .15rem 0 }
.label { font-size: .85rem; text-align: right } .track { position: relative; height: 1.3rem }
.attempt { position: absolute; top: .2rem; height: .9rem; background: #7aa6da; border-radius: 2px;
       font-size: .65rem; line-height: .9rem; overflow: hidden; white-space: nowrap; color: #0d2440 }
.fault { position: absolute; top: 0; width: 2px; height: 1.3rem; background: #b42318 }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181c }
  th, td { border-color: #333 } pre, .verdict { background: #22252b } .pass { color: #6fcf87 }
  .differs, .failed { color: #ff8a80 } .not-fired { color: #f0c060 } }
"""
_VERDICTS = ("pass", "differs", "failed", "not fired")


def render_html(document: Mapping[str, Any]) -> str:
    """The HTML of `DrillReport.document()`."""
    plain = document["undisturbed"]
    passed = "pass" if document["pass"] else "differs"
    parts = [
        f'<p class="verdict {passed}">{escape(verdict(document))}</p>',
        f"<h1>perdure drill: <code>{escape(shlex.join(document['command']))}</code></h1>",
        _facts(document),
    ]
    if plain["difference"]:
        parts += ["<h2>Two undisturbed runs differ</h2>", _explanation(plain)]
    failing = [run for run in document["runs"] if run["verdict"] in ("differs", "failed")]
    for run in failing:
        parts.append(
            f"<h2>Run {run['run']}: {escape(describe_fired(run['fired'], run['faults']))}</h2>"
        )
        parts.append(_explanation(run))
    if document["faults"]:
        rows = [
            [kind, counts["runs"], counts["fired"], counts["restored"], counts["pass"]]
            for kind, counts in sorted(document["faults"].items())
        ]
        head = ["fault", "runs", "fired", "restored", "same bits"]
        parts += ["<h2>Faults</h2>", _table(head, rows)]
    if document["not_tested"]:
        rows = [[kind, why] for kind, why in sorted(document["not_tested"].items())]
        parts += ["<h2>Not tested</h2>", _table(["fault", "why"], rows)]
    limits = "".join(f"<li>{escape(limit)}</li>" for limit in document["limits"])
    parts.append(f"<h2>Limits</h2><ul>{limits}</ul>")
    if document["runs"]:
        parts += ["<h2>Timeline</h2>", _timeline(document)]
        parts += ["<h2>Runs</h2>", _runs(document["runs"])]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>perdure drill</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _facts(document: Mapping[str, Any]) -> str:
    """What was run, when, where and on what."""
    plain = document["undisturbed"]
    rows = {
        "date": document["date"],
        "duration": f"{document['seconds']:.1f} s",
        "host": document["host"],
        "versions": _pairs(document["versions"]),
        "recipe": _pairs(document["recipe"]),
        "workers, seed": f"{document['workers']}, {document['seed']}",
        "undisturbed": (
            f"{plain['steps']} steps reported, {plain['checkpoints']} checkpoints, "
            f"{plain['seconds']:.2f} s"
        ),
        "fingerprint": plain["fingerprint"] or "-",
        "restores": restored_text(document),
    }
    lines = [f"<tr><th>{name}</th><td>{escape(str(v))}</td></tr>" for name, v in rows.items()]
    return '<table class="facts">\n' + "\n".join(lines) + "\n</table>"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items())) or "-"


def _timeline(document: Mapping[str, Any]) -> str:
    """One line for each run: its attempts as bars, and the faults on them."""
    longest = max(run["seconds"] for run in document["runs"]) or 1.0

    def at(seconds: float) -> str:
        return f"{100 * max(0.0, min(1.0, seconds / longest)):.2f}%"

    lines = []
    for run in document["runs"]:
        marks = []
        for attempt in run["attempts"]:
            title = f"{_origin(attempt)}; {_again(attempt)}; ended: {attempt['ended']}"
            marks.append(
                f'<div class="attempt" title="{escape(title)}" style="left:{at(attempt["began_s"])};'
                f'width:{at(attempt["seconds"])}">{escape(_origin(attempt))}</div>'
            )
            for fault in attempt["faults"]:
                marks.append(
                    f'<div class="fault" title="{escape(fault["what"])}" '
                    f'style="left:{at(fault["at_s"])}"></div>'
                )
        name = run["verdict"].replace(" ", "-")
        lines.append(
            f'<div class="run"><div class="label {name}">{run["run"]} {escape(run["kind"])}</div>'
            f'<div class="track">{"".join(marks)}</div></div>'
        )
    scale = f"<p>Blue: attempts; red: faults; the width is {longest:.1f} s.</p>"
    return scale + "\n" + "\n".join(lines)


def _origin(attempt: Mapping[str, Any]) -> str:
    return f"from step {attempt['restored']}" if attempt["restored"] else "from the beginning"


def _again(attempt: Mapping[str, Any]) -> str:
    span = attempt["recomputed"]
    if not span:
        return "no step again"
    return f"step {span[0]} again" if span[0] == span[1] else f"steps {span[0]} to {span[1]} again"


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "fault", "where it hit", "attempts", "repeated", "lost s", "fingerprint", ""]
    rows = [
        [
            run["run"],
            f"{run['kind']}: {run['place']}" if run["place"] else run["kind"],
            describe_fired(run["fired"], run["faults"]),
            "; ".join(f"{_origin(a)}, {_again(a)} ({a['ended']})" for a in run["attempts"]),
            run["repeated_steps"],
            run["lost_seconds"],
            (run["fingerprint"] or "-")[:16],
            run["verdict"],
        ]
        for run in runs
    ]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cell(tag: str, value: object) -> str:
        name = ""
        if isinstance(value, (int, float)):
            name = ' class="n"'
        elif value in _VERDICTS:
            name = f' class="{str(value).replace(" ", "-")}"'
        return f"<{tag}{name}>{escape(str(value))}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", name) for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(cell("td", value) for value in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _explanation(result: Mapping[str, Any]) -> str:
    parts: list[str] = []
    if difference := result["difference"]:
        parts.append(f"<p>First difference: {escape(difference['what'])}</p>")
        rows = [[leaf["path"], leaf["expected"], leaf["found"]] for leaf in difference["leaves"]]
        if rows:
            parts.append(_table(["leaf", "expected", "found"], rows))
    if result.get("problem"):
        parts.append(f"<p>{escape(result['problem'])}</p><pre>{escape(result['log'])}</pre>")
    if diagnosis := result["diagnosis"]:
        evidence = "".join(f"<li>{escape(line)}</li>" for line in diagnosis["evidence"])
        parts.append(
            f"<p><strong>Cause: {escape(diagnosis['what'])}</strong> "
            f"({escape(diagnosis['cause'])})</p><ul>{evidence}</ul>"
            f"<p>To repair it: {escape(diagnosis['advice'])}</p>"
        )
    return "\n".join(parts)
