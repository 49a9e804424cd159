"""The report of a drill as one HTML file that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from perdure.drill.text_report import describe_fired, verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font: .85rem ui-monospace, monospace } pre { background: #f5f5f5; padding: .6rem;
       overflow-x: auto }
.pass { color: #116329 } .differs, .failed { color: #b42318; font-weight: 600 }
.not-fired { color: #8a5a00 } .verdict { font-size: 1.1rem; padding: .6rem; background: #f5f5f5 }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181c }
  th, td { border-color: #333 } pre, .verdict { background: #22252b } .pass { color: #6fcf87 }
  .differs, .failed { color: #ff8a80 } .not-fired { color: #f0c060 } }
"""


def render_html(document: Mapping[str, Any]) -> str:
    """The HTML of `DrillReport.document()`."""
    plain = document["undisturbed"]
    passed = "pass" if document["pass"] else "differs"
    parts = [
        f"<h1>perdure drill: <code>{escape(' '.join(document['command']))}</code></h1>",
        f'<p class="verdict {passed}">{escape(verdict(document))}</p>',
        (
            f"<p>Undisturbed: {plain['steps']} steps reported, {plain['checkpoints']} checkpoints, "
            f"{plain['seconds']:.2f} s, fingerprint "
            f"<code>{escape(plain['fingerprint'] or '-')}</code>. "
            f"{document['workers']} worker(s), seed {document['seed']}.</p>"
        ),
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
            [kind, counts["runs"], counts["fired"], counts["pass"]]
            for kind, counts in sorted(document["faults"].items())
        ]
        parts += ["<h2>Faults</h2>", _table(["fault", "runs", "fired", "same bits"], rows)]
        parts += ["<h2>Runs</h2>", _runs(document["runs"])]
    if document["impossible"]:
        rows = [[kind, why] for kind, why in sorted(document["impossible"].items())]
        parts += ["<h2>Not tried</h2>", _table(["fault", "why"], rows)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>perdure drill</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "fault", "where it hit", "attempts", "repeated", "lost s", "fingerprint", ""]
    rows = [
        [
            run["run"],
            run["kind"],
            describe_fired(run["fired"], run["faults"]),
            len(run["attempts"]),
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
        elif value in ("pass", "differs", "failed", "not fired"):
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
