"""Draws panels with matplotlib, the same bytes for the same panels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from perdure.errors import missing_extra
from perdure.report.html_page import visible
from perdure.report.plot_panels import Panel, PlotLine, PlottedAttempt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg"}
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
_CUT = "#b42318"
_COLOURS = ("#1f5f8b", "#b3541e", "#2f7236", "#7a4fa0", "#86650a", "#a8326e")
_DASHES = ("-", "--", ":", "-.")
_MOST_NUMBERS = 12
_LARGE = 1e150
"""Larger values are drawn in units of this: ticks of matplotlib beyond them would overflow."""
_SETTINGS = {
    "svg.hashsalt": "perdure",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dfe2e6",
    "axes.edgecolor": "#9ca6b0",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def draw_figure(panels: Sequence[Panel]) -> Figure:
    """The panels as a figure of matplotlib, without its global state.

    Raises `MissingExtraError` if matplotlib is not installed.
    """
    mpl, figure_class = _matplotlib()
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = -(-len(panels) // columns)
    with mpl.rc_context():
        mpl.rcdefaults()  # not the settings of this machine
        mpl.rcParams.update(_SETTINGS)
        width = 7.0 if columns == 1 else 5.2 * columns
        figure = figure_class(figsize=(width, 3.3 * rows), layout="constrained")
        for number, panel in enumerate(panels, 1):
            _draw(figure.add_subplot(rows, columns, number), panel)
    return figure


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """A figure as "png" or "svg"."""
    mpl, _ = _matplotlib()
    buffer = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have characters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        figure.savefig(buffer, format=kind, dpi=144, metadata=_METADATA[kind])
    return buffer.getvalue()


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise missing_extra("plot", error) from error
    return mpl, Figure


def _draw(axes: Any, panel: Panel) -> None:
    axes.set_title(visible(panel.title), parse_math=False)
    axes.set_xlabel("step")
    axes.grid(axis="x", visible=False)
    axes.xaxis.get_major_locator().set_params(
        integer=True, min_n_ticks=1
    )  # there is no half of a step
    values = [value for line in panel.lines for _, value in line.points if value is not None]
    unit = _LARGE if any(abs(value) > _LARGE for value in values) else 1.0
    if unit != 1.0:
        axes.set_ylabel(f"in units of {unit:.0e}")
    handles = [_line(axes, line, unit) for line in panel.lines]
    if panel.logarithmic:
        _scale(axes, [value / unit for value in values])
    left, right = axes.get_xlim()  # the values decide what is shown, and not the attempts
    runs = {id(line.attempts): line.attempts for line in panel.lines}
    for attempts in runs.values():
        for attempt in attempts:
            if attempt.interrupted and left <= attempt.end <= right:
                axes.axvline(
                    attempt.end, color=_CUT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1
                )
        _shade_repeated(axes, attempts)
    if len(runs) == 1:
        _number(axes, panel.lines[0].attempts, left, right)
    axes.set_xlim(left, right)
    if panel.has_names:
        # A name that begins with an underscore would be left out.
        names = [f" {visible(line.label)}" for line in panel.lines]
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(names) > 4 else {}
        legend = axes.legend(handles, names, frameon=False, fontsize=8, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic scale, which ends in zero below the least value if a value is zero."""
    positive = [value for value in values if value > 0]
    if not positive:
        return
    if len(positive) == len(values):
        axes.set_yscale("log")
    else:
        axes.set_yscale("symlog", linthresh=min(positive))
        axes.set_ylim(bottom=-min(positive) / 2)  # no value is below zero


def _line(axes: Any, line: PlotLine, unit: float) -> Any:
    steps = [step for step, _ in line.points]
    values = [float("nan") if value is None else value / unit for _, value in line.points]
    return axes.plot(
        steps,
        values,
        color=_COLOURS[line.colour % len(_COLOURS)],
        linestyle=_DASHES[line.colour // len(_COLOURS) % len(_DASHES)],
        linewidth=1.6,
        marker="o" if len(steps) <= 40 else None,
        markersize=3,
    )[0]


def _shade_repeated(axes: Any, attempts: Sequence[PlottedAttempt]) -> None:
    """Shade the steps that an attempt had to repeat."""
    for before, after in pairwise(attempts):
        if after.start < before.end:
            axes.axvspan(after.start, before.end, color=_CUT, alpha=0.08, linewidth=0, zorder=0)


def _number(axes: Any, attempts: Sequence[PlottedAttempt], left: float, right: float) -> None:
    """The number of each attempt above the step at which it began, or at the left border."""
    if not 1 < len(attempts) <= _MOST_NUMBERS:
        return
    for attempt in attempts:
        if attempt.start <= right and attempt.end >= left:
            axes.text(
                max(attempt.start, left),
                1.0,
                f" {attempt.number}",
                transform=axes.get_xaxis_transform(),
                fontsize=7,
                color=_CUT,
                verticalalignment="top",
            )
