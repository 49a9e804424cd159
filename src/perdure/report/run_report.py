"""`report`: what a person wants to know about one run or several, as one HTML file."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from perdure.checkpoint.address import Where, open_run
from perdure.errors import ArgumentError, needs_extra
from perdure.look.tables import natural_key, size_text, visible
from perdure.report.figure import page_svg, write_output
from perdure.report.panels import Panel, document_panels, labels
from perdure.report.run_document import compare_runs, read_run
from perdure.text import counted

_Paths = Sequence[str | os.PathLike[str]]
_VERIFICATION = {"run", "good", "bad", "unread", "problems"}
_DRILL = {"command", "pass", "stopped", "restored", "undisturbed", "faults", "not_tested", "runs"}
"""What a report needs of the documents of `perdure verify` and `perdure drill`."""


@dataclass(frozen=True)
class RunReport:
    """A report. A notebook shows its page.

    Attributes:
        document: What it says, in plain values, as `perdure report --json` prints it.
    """

    document: dict[str, Any]

    @cached_property
    def html(self) -> str:
        """The page, which needs no other file and makes no request.

        Raises `MissingExtraError` if Jinja2 or matplotlib is not installed.
        """

        return render_report(self.document)

    @property
    def ok(self) -> bool:
        """Whether every checkpoint of every run is whole, as far as this report has read."""
        rows = [row for run in self.document["runs"] for row in run["checkpoints"]]
        return not any(row["state"] or row["verified"] == "bad" for row in rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page; an older page there is replaced.

        Raises `ArgumentError` if `path` cannot be written, or holds something else than a page.
        """
        write_output(Path(path), self.html.encode())

    def _repr_html_(self) -> str:
        # A frame, so that the style sheet does not change the notebook.
        style = "width:100%;height:45rem;border:0"
        return f'<iframe sandbox srcdoc="{escape(self.html)}" style="{style}"></iframe>'


def report(
    *runs: Where,
    logs: _Paths = (),
    drills: _Paths = (),
    verified: _Paths = (),
    leaves: str | Iterable[str] | None = None,
) -> RunReport:
    """What runs are, how they went, and what they hold; several are compared.

    Nothing is changed. Damage is reported and raises nothing.

    Args:
        runs: Run directories.
        logs: Log directories of `perdure run`, or records. A run takes the one in whose attempts its
            checkpoints were saved. If none is given, `perdure-logs` is looked for in the run directory,
            in the two directories above it, and in the working directory.
        drills: Files with documents of `perdure drill --json`.
        verified: Files with documents of `perdure verify RUN --json`, one for each run at most.
        leaves: The leaves whose changes are shown, as for `restore(leaves=...)`; all by default.

    Raises:
        NotARunError: A run directory or a record is not there.
        ArgumentError: No run is named, one of the files is not such a document, two documents of
            `verify` are of one run, or `leaves` selects nothing.
        UnreachableError: A run directory cannot be listed.
    """
    if not runs:
        raise ArgumentError("report: expected a run directory, found none.")
    opened = [open_run(where) for where in runs]
    verifications = _verifications(verified, [run.where for run in opened])
    where = [Path(path) for path in logs]
    read = [
        read_run(run, logs=where, leaves=leaves, verified=verifications.get(run.where))
        for run in opened
    ]
    documents = [document for document, _ in read]
    comparison = compare_runs(documents, [each for _, each in read]) if len(read) > 1 else None
    found = [_document(Path(path), _DRILL, "drill") for path in drills]
    return RunReport({"runs": documents, "comparison": comparison, "drills": found})


def _verifications(paths: _Paths, runs: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The documents of `perdure verify` by the run that they are of."""
    found: dict[str, Mapping[str, Any]] = {}
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        document = _document(path, _VERIFICATION, "verify RUN")
        run = document["run"]
        if run not in runs:
            raise ArgumentError(
                f"{path}: expected a document of `perdure verify` of one of {', '.join(runs)}, "
                f"found one of {run}."
            )
        if run in found:
            raise ArgumentError(
                f"{path}: expected one document of `perdure verify` for each run at most, and "
                f"{files[run]} is also of {run}. Name the newer one alone."
            )
        found[run], files[run] = document, path
    return found


def _document(path: Path, fields: set[str], command: str) -> dict[str, Any]:
    """The JSON document of a command, which must have `fields`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        lacking = fields - dict(document).keys()
        if lacking:
            raise ValueError(f"there is no {min(lacking)!r}")
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: expected the document of `perdure {command} --json`, found something else: "
            f"{error}. Write it with: perdure {command} --json > {path.name}"
        ) from error
    return document


LEVELS = 10
"""Steps of the colour scale of a heat map."""

_MOST_METRICS = 24
_Document = Mapping[str, Any]


def render_report(document: _Document) -> str:
    """The HTML of `RunReport.document`: one run, or several side by side.

    Raises `MissingExtraError` if Jinja2 or matplotlib is not installed.
    """
    environment = templates()
    runs = document["runs"]
    names = labels([run["run"] for run in runs])
    heading = names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    panels = document_panels(list(zip(names, runs, strict=True)))
    return environment.get_template("report.html.j2").render(
        title=f"{heading} - perdure report",
        heading=heading,
        names=names,
        charts=[_chart(panel, n) for n, panel in enumerate(panels[:_MOST_METRICS])],
        more_metrics=max(0, len(panels) - _MOST_METRICS),
        **document,
    )


def render_drill(document: _Document) -> str:
    """The HTML of `DrillReport.document()`; raises as `render_report`."""
    template = templates().get_template("drill.html.j2")
    return template.render(title="perdure drill", drill=document)


def duration(seconds: float) -> str:
    """A duration as text, such as `3 min 20 s`."""
    units = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for unit, length, part, below in units:
        if seconds >= length:
            return f"{int(seconds // length)} {unit} {int(seconds % length // below)} {part}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


@cache
def templates() -> Any:
    """The templates; raises `MissingExtraError` if Jinja2 or matplotlib is not installed."""
    with needs_extra("report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    from perdure.checkpoint.recipe import ENVIRONMENT_FIELDS
    from perdure.drill.drill_report import describe_fired, restored_text, verdict

    def text(value: object) -> object:
        return value if isinstance(value, Markup) else visible(value)

    def code(value: object) -> Markup:
        return Markup("<code>{}</code>").format(visible(value))

    environment = Environment(
        loader=PackageLoader("perdure.report"),
        autoescape=True,
        finalize=text,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "clock": lambda when: str(when or "-")[:19].replace("T", " "),
        "code_or_dash": lambda value: (
            "-" if value is None else code(value if isinstance(value, str) else repr(value))
        ),
        "command": shlex.join,
        "dash": lambda value: "-" if value is None else value,
        "duration": duration,
        "number": lambda value: "not finite" if value is None else f"{float(value):.4g}",
        "percent": lambda value: "-" if value is None else f"{100 * value:.1f} %",
        "share": lambda part, whole: f"{100 * max(0.0, min(1.0, part / (whole or 1))):.2f}%",
        "size": size_text,
        "time": lambda when: when.replace("T", " ").replace("Z", " UTC"),
    }
    environment.globals |= {
        "checkpoint_metrics": _checkpoint_metrics,
        "code": code,
        "colour_scale": _colour_scale,
        "counted": counted,
        "describe_fired": describe_fired,
        "environment_fields": ENVIRONMENT_FIELDS,
        "restored_text": restored_text,
        "verdict": verdict,
    }
    return environment


def _chart(panel: Panel, number: int) -> dict[str, Any]:
    """A metric as the template draws it: without a finite value it has no drawing."""
    from markupsafe import Markup

    ends = []
    for line in panel.lines:
        values = [(step, value) for step, value in line.points if value is not None]
        if values:
            ends.append((line.label, *values[0], *values[-1]))
    said = "; ".join(f"{e[0]}: {e[2]:.4g} at step {e[1]}, {e[4]:.4g} at step {e[3]}" for e in ends)
    svg = Markup("")
    if ends:
        start = Markup('<svg role="img" aria-label="{}"').format(
            visible(f"{panel.title} over steps. {said}")
        )
        drawing = page_svg(panel, number).removeprefix("<svg")
        svg = start + Markup(drawing)  # noqa: S704 (matplotlib escapes the texts in it)
    return {
        "name": panel.title,
        "newest": " / ".join(f"{end[4]:.4g}" for end in ends),
        "interrupted": any(a.interrupted for line in panel.lines for a in line.attempts),
        "svg": svg,
    }


def _checkpoint_metrics(run: _Document) -> list[str]:
    """The names of the metrics that have a column in the table of checkpoints."""
    names = {name for row in run["checkpoints"] for name in row.get("metrics", ())}
    return sorted(names, key=natural_key)[:3]


class _Scale(NamedTuple):
    """A logarithmic scale of colours from `low` to `high`."""

    low: float
    high: float

    def level(self, change: float) -> int:
        """The number of the colour of a change."""
        if change <= 0:
            return 0
        share = math.log10(change / self.low) / math.log10(self.high / self.low)
        return min(LEVELS - 1, max(0, int(share * LEVELS)))


def _colour_scale(changes: _Document) -> _Scale:
    """The scale of one table, of a factor of ten at least."""
    numbers = [
        change
        for row in changes["layers"]
        for change in row["changes"]
        if isinstance(change, float) and change > 0
    ]
    low = min(numbers, default=0.01)
    return _Scale(low, max(low * 10, max(numbers, default=1.0)))
