"""`plot`: metrics of runs over steps, or norms and update ratios of their leaves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perdure.checkpoint.address import Where, open_run
from perdure.errors import ArgumentError
from perdure.report.figure import FORMATS, draw_figure, figure_bytes
from perdure.report.leaf_changes import Problems
from perdure.report.output_file import write_output
from perdure.report.plot_panels import Panel, metric_panels, norm_panels
from perdure.report.report_page import labels
from perdure.report.run_document import contents_and_problems

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Paths = Sequence[str | os.PathLike[str]]


def plot(
    *runs: Where,
    metrics: str | Iterable[str] | None = None,
    logs: _Paths = (),
    norms: bool = False,
    leaves: str | Iterable[str] | None = None,
) -> Figure:
    """The metrics of runs over their steps as a figure of matplotlib; a notebook shows it.

    Interruptions are dashed lines, and repeated steps are shaded, if a record of `perdure run` is
    found. A checkpoint that is damaged or cannot be read has no values of its own in the figure; a
    warning names it, and a run of which nothing is drawn.

    Args:
        runs: Run directories; each is a line.
        metrics: Names or patterns (`*loss`) of metrics; all by default.
        logs: Log directories of `perdure run`, as for `report`.
        norms: Draw the norm of each layer and its relative change between the kept checkpoints, in
            place of metrics.
        leaves: The leaves to draw the norms of, as for `restore(leaves=...)`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        NotARunError: A run directory or a record is not there.
        ArgumentError: No run is named, or there is nothing to draw.
        CorruptionError: A checkpoint whose norms are drawn is damaged.
    """
    drawing = plot_drawing(*runs, metrics=metrics, logs=logs, norms=norms, leaves=leaves)
    for sentence in (*drawing.problems, *drawing.notes):
        warnings.warn(sentence, stacklevel=2)
    return draw_figure(drawing.panels)


class Drawing(NamedTuple):
    """What `plot` draws, in plain values.

    Attributes:
        panels: What is drawn.
        problems: A sentence on each checkpoint that is damaged or cannot be read, as far as manifests
            and the leaves that were read tell.
        notes: A sentence on each run of which nothing is drawn.
    """

    panels: list[Panel]
    problems: list[str]
    notes: list[str]


def plot_panels(
    *runs: Where,
    metrics: str | Iterable[str] | None = None,
    logs: _Paths = (),
    norms: bool = False,
    leaves: str | Iterable[str] | None = None,
) -> list[Panel]:
    """The panels of `plot_drawing`."""
    return plot_drawing(*runs, metrics=metrics, logs=logs, norms=norms, leaves=leaves).panels


def plot_drawing(
    *runs: Where,
    metrics: str | Iterable[str] | None = None,
    logs: _Paths = (),
    norms: bool = False,
    leaves: str | Iterable[str] | None = None,
) -> Drawing:
    """What `plot` draws, in plain values; needs no matplotlib. Arguments and errors as for `plot`."""
    if not runs:
        raise ArgumentError("plot: expected a run directory, found none.")
    opened = [open_run(where) for where in runs]
    named = list(zip(labels([run.where for run in opened]), opened, strict=True))
    paths = [Path(path) for path in logs]
    found: dict[str, Problems] = {}
    is_norms = norms or leaves is not None
    if is_norms:
        if metrics is not None:
            raise ArgumentError("plot: expected metrics or the norms of leaves, found both.")
        panels = norm_panels(named, leaves, paths, found)
    else:
        patterns = [metrics] if isinstance(metrics, str) else list(metrics or ())
        panels = metric_panels(named, patterns, paths)
    problems: list[str] = []
    notes: list[str] = []
    for label, run in dict(named).items():
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


def save_plot(panels: Sequence[Panel], path: str | os.PathLike[str]) -> None:
    """Draw panels into a PNG or an SVG, by the end of its name; the same bytes for the same panels.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentError: The name has another end, or the file cannot be written.
    """
    kind = picture_kind(path)
    write_output(Path(path), figure_bytes(draw_figure(panels), kind))


def picture_kind(path: str | os.PathLike[str]) -> str:
    """ "png" or "svg", by the end of a name; raises `ArgumentError` for another."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ArgumentError(f"{path}: expected a name that ends in .png or .svg, found {suffix!r}.")
    return FORMATS[suffix]
