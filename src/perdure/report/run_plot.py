"""`plot`: metrics of runs over steps, or norms and update ratios of their leaves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.checkpoint.address import Where, open_run
from perdure.errors import ArgumentError
from perdure.report.figure import FORMATS, draw_figure, figure_bytes
from perdure.report.output_file import write_output
from perdure.report.panels import Drawing, Panel, drawing, labels

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
    """
    found = plot_drawing(*runs, metrics=metrics, logs=logs, norms=norms, leaves=leaves)
    for sentence in (*found.problems, *found.notes):
        warnings.warn(sentence, stacklevel=2)
    return draw_figure(found.panels)


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
    patterns = [metrics] if isinstance(metrics, str) else list(metrics or ())
    return drawing(named, patterns, [Path(path) for path in logs], norms, leaves)


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
