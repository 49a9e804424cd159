"""What a figure, a page or a terminal draws: a panel for each metric, or the norms of leaves."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from perdure.checkpoint.address import Where, checkpoint_at, open_run
from perdure.errors import ArgumentError, StepNotFoundError
from perdure.look.tables import natural_key
from perdure.report.layer_changes import (
    NEW,
    SAME,
    UNREADABLE,
    Problems,
    change_ratio,
    grouped,
    layers_of,
    norm_history,
)
from perdure.report.run_document import (
    Series,
    contents_and_problems,
    find_life,
    metric_series,
)
from perdure.store import Run

Paths = Sequence[str | os.PathLike[str]]

MOST_LINES = 12
"""Leaves of one panel; more are drawn as layers."""

MOST_PANELS = 24

NO_FINITE_VALUE = "no finite value"

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PlottedAttempt:
    """One attempt: its number, the step it began at, its newest step, whether another followed."""

    number: int
    start: int
    end: int
    interrupted: bool


@dataclass(frozen=True)
class PlotLine:
    """One line of a panel: its values by step, the attempts of its run, the number of its colour."""

    label: str
    points: Series
    attempts: Sequence[PlottedAttempt] = ()
    colour: int = 0
    without_values: str = NO_FINITE_VALUE


@dataclass(frozen=True)
class Panel:
    """One panel.

    `logarithmic`: in a graph of text, each line has a scale of its own. `named`: the title does
    not say whose a single line is.
    """

    title: str
    lines: Sequence[PlotLine]
    logarithmic: bool = False
    named: bool = False

    @property
    def has_names(self) -> bool:
        """Whether its lines need their names."""
        return self.named or len(self.lines) > 1

    def document(self) -> dict[str, Any]:
        """The panel in plain values."""
        lines = [
            {
                "label": line.label,
                "points": [[step, value] for step, value in line.points],
                "interrupted_at": [a.end for a in line.attempts if a.interrupted],
            }
            for line in self.lines
        ]
        return {"title": self.title, "lines": lines}


class Drawing(NamedTuple):
    """What is drawn, with a sentence on each damaged checkpoint and each empty run."""

    panels: list[Panel]
    problems: list[str]
    notes: list[str]


def plot_drawing(
    *runs: Where,
    metrics: str | Iterable[str] | None = None,
    logs: Paths = (),
    norms: bool = False,
    leaves: str | Iterable[str] | None = None,
) -> Drawing:
    """What `plot` draws, in plain values; needs no matplotlib. Arguments and errors as for `plot`."""
    if not runs:
        raise ArgumentError("plot: expected a run directory, found none.")
    patterns = [metrics] if isinstance(metrics, str) else list(metrics or ())
    is_norms = norms or leaves is not None
    if is_norms and patterns:
        raise ArgumentError("plot: expected metrics or the norms of leaves, found both.")
    opened = [open_run(where) for where in runs]
    named = list(zip(labels([run.where for run in opened]), opened, strict=True))
    paths = [Path(path) for path in logs]
    found: dict[str, Problems] = {}
    if is_norms:
        panels = _norm_panels(named, leaves, paths, found)
    else:
        panels = _metric_panels(named, patterns, paths)
    problems: list[str] = []
    notes: list[str] = []
    for label, run in named:
        damage = {**found.get(run.where, {}), **contents_and_problems(run)[1]}
        problems += [
            f"{run.where}: step {step} is {state}: {why}"
            for step, (state, why) in sorted(damage.items())
        ]
        if is_norms and not run.steps():
            notes.append(f"{run.where}: nothing is drawn of it, because it has no checkpoint yet.")
        elif not is_norms and label not in {line.label for panel in panels for line in panel.lines}:
            notes.append(f"{run.where}: nothing is drawn of it, because it has no such metric.")
    return Drawing(panels, problems, notes)


def labels(where: Sequence[str]) -> list[str]:
    """A short name for each run: the end of its path, as long as they differ."""
    ends = [path.rstrip("/").rpartition("/")[2] or path for path in where]
    return ends if len(set(ends)) == len(ends) else list(where)


def document_panels(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Panel]:
    """A panel for each metric of documents of runs, with a line for each run that has it."""
    lines: dict[str, list[PlotLine]] = {}
    for number, (label, document) in enumerate(runs):
        attempts = _attempts(document["life"])
        for name, points in document["metrics"].items():
            lines.setdefault(name, []).append(PlotLine(label, points, attempts, number))
    several = len(runs) > 1
    return [Panel(name, lines[name], named=several) for name in sorted(lines, key=natural_key)]


def _metric_panels(
    runs: Sequence[tuple[str, Run]], patterns: Sequence[str], logs: Sequence[Path]
) -> list[Panel]:
    """Raises `ArgumentError` if no run has such a metric, or there are more than 24."""
    documents: list[tuple[str, Mapping[str, Any]]] = []
    for label, run in runs:
        manifests = run.contents().manifests
        metrics, _ = metric_series(run, manifests.values())
        documents.append((label, {"metrics": metrics, "life": find_life(run, logs)}))
    panels = document_panels(documents)
    where = ", ".join(run.where for _, run in runs)
    if not panels:
        raise ArgumentError(
            f"{where}: expected metrics, in metrics.jsonl or in the checkpoints, found none. --norms "
            "draws the norms of the leaves."
        )
    names = [panel.title for panel in panels]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, 3) or names[:3]
            raise ArgumentError(
                f"{where}: no metric matches {pattern!r}; there are {len(names)}, such as "
                f"{', '.join(close)}."
            )
    if patterns:
        panels = [p for p in panels if any(fnmatchcase(p.title, each) for each in patterns)]
    if len(panels) > MOST_PANELS:
        raise ArgumentError(
            f"{where}: expected at most {MOST_PANELS} metrics in one figure, found {len(panels)}. "
            f"Select some with --metric, such as --metric {panels[0].title!r}."
        )
    return panels


def _norm_panels(
    runs: Sequence[tuple[str, Run]],
    leaves: str | Iterable[str] | None,
    logs: Sequence[Path],
    problems: dict[str, Problems],
) -> list[Panel]:
    """Two panels for each run: the norm of each layer, and its relative change between checkpoints.

    Up to 12 leaves have a line each; more are put together by the first parts of their paths.
    """
    panels: list[Panel] = []
    steps = [run.steps() for _, run in runs]
    if not any(steps):
        where = ", ".join(run.where for _, run in runs)
        raise StepNotFoundError(f"{where}: expected a checkpoint, found none yet.")
    for (label, run), saved_steps in zip(runs, steps, strict=True):
        if not saved_steps:
            continue
        checkpoints = [checkpoint_at(run, step) for step in saved_steps]
        attempts = _attempts(find_life(run, logs))
        found = problems.setdefault(run.where, {})
        norms, changes = norm_history(checkpoints, leaves, found)
        if not any(norms) and not found:
            raise ArgumentError(
                f"{run.where}: expected floating-point leaves, found none; `perdure show --tree` lists "
                f"all."
            )
        before = f"{label}: " if len(runs) > 1 else ""
        of_norms = [
            (step, layer, math.sqrt(math.fsum(squares)))
            for step, layer, squares in _by_layer(saved_steps, norms)
        ]
        of_changes = [
            (step, layer, change_ratio(parts) or SAME)
            for step, layer, parts in _by_layer(saved_steps[1:], changes)
        ]
        titles = ("norm", "relative change since the checkpoint before")
        for title, rows in zip(titles, (of_norms, of_changes), strict=True):
            if lines := _lines(rows, attempts):
                panels.append(Panel(before + title, lines, logarithmic=True))
    return panels


def _by_layer(
    steps: Sequence[int], found: Sequence[Mapping[str, _Value]]
) -> list[tuple[int, str, list[_Value]]]:
    """What was found of each layer at each step."""
    layers = layers_of((path for each in found for path in each), MOST_LINES)
    return [
        (step, layer, parts)
        for step, each in zip(steps, found, strict=True)
        for layer, parts in grouped(each, layers).items()
    ]


def _lines(
    rows: Sequence[tuple[int, str, float | str]], attempts: Sequence[PlottedAttempt]
) -> list[PlotLine]:
    """A line for each layer; a word is no value."""
    points: dict[str, Series] = {}
    found: dict[str, set[float | str]] = {}
    for step, layer, value in rows:
        finite = value if isinstance(value, float) and math.isfinite(value) else None
        points.setdefault(layer, []).append((step, finite))
        found.setdefault(layer, set()).add(value)
    lines = []
    for number, name in enumerate(sorted(points, key=natural_key)[:MOST_LINES]):
        why = NO_FINITE_VALUE
        if found[name] <= {SAME, NEW}:
            why = "no change"
        elif not found[name].isdisjoint(UNREADABLE):
            why = "no value that can be read"
        lines.append(PlotLine(name, points[name], attempts, number, why))
    return lines


def _attempts(life: Mapping[str, Any] | None) -> list[PlottedAttempt]:
    """The attempts that reported steps; none without a record."""
    rows = [row for start in (life["starts"] if life else ()) for row in start["attempts"]]
    return [
        PlottedAttempt(
            number, row["start"], row["end"], number < len(rows) and row["kind"] != "done"
        )
        for number, row in enumerate(rows, 1)
        if row["start"] is not None and row["end"] is not None
    ]
