"""Draws panels with matplotlib, for files and inside of pages: the same bytes for the same panels."""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from perdure.checkpoint.address import Where
from perdure.errors import ArgumentError, needs_extra
from perdure.look.tables import visible
from perdure.report.panels import Panel, Paths, PlotLine, PlottedAttempt, plot_drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg"}
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
}
_CUT, _RULE = "#b42318", "#dfe2e6"
_COLOURS = ("#1f5f8b", "#b3541e", "#2f7236", "#7a4fa0", "#86650a", "#a8326e")
_DASHES = ("-", "--", ":")
_HEAD_BYTES = 8
_MOST_NUMBERS = 12
_LARGE = 1e150
"""Larger values are drawn as this: ticks of matplotlib beyond it would overflow."""
_SETTINGS = {
    "svg.hashsalt": "perdure",
    "svg.fonttype": "none",  # text stays text
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _RULE,
    "axes.edgecolor": "#9ca6b0",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
_PAGE_STYLE = {
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "font.size": 8.0,
}
_VARIABLES = {_CUT: "bad", _RULE: "rule"} | {c: f"s{n}" for n, c in enumerate(_COLOURS)}
"""The colours that a page has as variables of its style sheet, light and dark."""


def plot(
    *runs: Where,
    metrics: str | Iterable[str] | None = None,
    logs: Paths = (),
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


def save_plot(panels: Sequence[Panel], path: str | os.PathLike[str]) -> None:
    """Draw panels into a PNG or an SVG, by the end of its name; the same bytes for the same panels.

    Raises MissingExtraError without matplotlib, ArgumentError for another name or an unwritable
    file.
    """
    kind = picture_kind(path)
    write_output(Path(path), figure_bytes(draw_figure(panels), kind))


def picture_kind(path: str | os.PathLike[str]) -> str:
    """ "png" or "svg", by the end of a name; raises `ArgumentError` for another."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ArgumentError(f"{path}: expected a name that ends in .png or .svg, found {suffix!r}.")
    return FORMATS[suffix]


def write_output(path: Path, data: bytes) -> None:
    """Write `data` to `path`; an older file of the same kind is replaced in one step.

    A file that begins with other bytes is kept: ArgumentError. A pipe or a device is written to.
    """
    try:
        if os.path.lexists(path) and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.is_file():
            with target.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if head not in (b"", data[:_HEAD_BYTES]):
                raise ArgumentError(
                    f"{path}: expected a new file, or an older file of this kind to replace; found a "
                    "file with other contents. Name another file, or remove that one."
                )
        _replace(target, data)
    except OSError as error:
        raise ArgumentError(
            f"{path}: cannot be written: {error}. Expected the path of a file in a directory that "
            "exists and can be written to."
        ) from error


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name[:40]}-{uuid4().hex[:8]}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def draw_figure(panels: Sequence[Panel]) -> Figure:
    """The panels as a figure of matplotlib, without its global state, or MissingExtraError."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = -(-len(panels) // columns)
    width = 7.0 if columns == 1 else 5.2 * columns
    with _matplotlib() as figure_class:
        figure = figure_class(figsize=(width, 3.3 * rows), layout="constrained")
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            handles = _draw(axes, panel)
            axes.set_title(visible(panel.title), parse_math=False)
            axes.set_xlabel("step")
            if panel.has_names:
                _add_legend(axes, handles, panel.lines)
    return figure


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """A figure as "png" or "svg"."""
    buffer = io.BytesIO()
    with _matplotlib(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have characters that the font lacks
        figure.savefig(buffer, format=kind, dpi=144, metadata=_METADATA[kind])
    return buffer.getvalue()


def page_svg(panel: Panel, number: int) -> str:
    """One panel as an element of a page, in its colours; `number` makes names unique in the page."""
    with _matplotlib(_PAGE_STYLE | {"svg.hashsalt": f"perdure-{number}"}) as figure_class:
        figure = figure_class(figsize=(4.2, 2.1))
        axes: Any = figure.add_axes((0.14, 0.12, 0.84, 0.83))
        axes.yaxis.get_major_locator().set_params(nbins=4)
        for line in _draw(axes, panel):
            line.set(marker="o" if len(line.get_xdata()) == 1 else "", linewidth=1.3)
        axes.set_facecolor("none")
        figure.set_facecolor("none")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=_METADATA["svg"])
    drawing = buffer.getvalue().partition("<svg")[2]
    # The style sheet in it would be that of the whole page.
    drawing = re.sub(r"(?s)<(metadata|style).*?</\1>|<!--.*?-->", "", drawing)
    drawing = re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", drawing, count=5)
    drawing = re.sub(r'<g id="[^"]*"/>|(?<=<g) id="[^"]*"|\s*\n\s*(?=<)', "", drawing)
    drawing = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", drawing)
    drawing = re.sub(r"; font-family: [^;\"]*", "", drawing)
    for colour, name in _VARIABLES.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return f"<svg{drawing}"


@contextmanager
def _matplotlib(settings: dict[str, Any] | None = None) -> Iterator[type[Figure]]:
    """The class of figures, with our settings and not those of this machine."""
    with needs_extra("report"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    with mpl.rc_context():
        mpl.rcdefaults()
        ours: Any = {**_SETTINGS, **(settings or {})}
        mpl.rcParams.update(ours)
        yield Figure


def _draw(axes: Any, panel: Panel) -> list[Any]:
    """Draw the lines of a panel with their interruptions; returns the lines."""
    axes.grid(axis="x", visible=False)
    # There is no half of a step.
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    handles = [_line(axes, line) for line in panel.lines]
    if panel.logarithmic:
        _scale(axes, [abs(value) for line in handles for value in line.get_ydata()])
    left, right = axes.get_xlim()  # the values decide what is shown, and not the attempts
    runs = dict.fromkeys(tuple(line.attempts) for line in panel.lines)
    for attempts in runs:
        for attempt in attempts:
            if attempt.interrupted and left <= attempt.end <= right:
                axes.axvline(
                    attempt.end, color=_CUT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1
                )
        for before, after in pairwise(attempts):  # the steps that were repeated
            if after.start < before.end:
                axes.axvspan(after.start, before.end, color=_CUT, alpha=0.08, linewidth=0, zorder=0)
    if len(runs) == 1:
        _number(axes, panel.lines[0].attempts, left, right)
    axes.set_xlim(left, right)
    return handles


def _add_legend(axes: Any, handles: Sequence[Any], lines: Sequence[PlotLine]) -> None:
    names = [f" {visible(line.label)}" for line in lines]  # matplotlib leaves out "_name"
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(names) > 4 else {}
    legend = axes.legend(handles, names, frameon=False, fontsize=8, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic scale, which ends in zero below the least value if a value is zero."""
    positive = [value for value in values if value > 0]
    if not positive:
        return
    if 0 not in values:
        axes.set_yscale("log")
    else:
        axes.set_yscale("symlog", linthresh=min(positive))
        axes.set_ylim(bottom=-min(positive) / 2)  # no value is below zero


def _line(axes: Any, line: PlotLine) -> Any:
    steps = [step for step, _ in line.points]
    values = [math.nan if v is None else max(-_LARGE, min(_LARGE, v)) for _, v in line.points]
    return axes.plot(
        steps,
        values,
        color=_COLOURS[line.colour % len(_COLOURS)],
        linestyle=_DASHES[line.colour // len(_COLOURS) % len(_DASHES)],
        linewidth=1.6,
        marker="o" if len(steps) <= 40 else None,
        markersize=3,
    )[0]


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


BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
PLAIN = "_.-=+*%#"
"""For a terminal whose encoding has no blocks."""

_MOST_NAME = 40
_LEAST_WIDTH = 10


def text_graph(panels: Sequence[Panel], width: int, levels: str = BLOCKS) -> list[str]:
    """The lines of text, `width` characters each; `levels` are the characters from low to high."""
    lines: list[str] = []
    for panel in panels:
        steps = [step for line in panel.lines for step, _ in line.points]
        first, last = min(steps), max(steps)
        names = [_name(panel.title)]
        if panel.has_names:
            lines.append(f"{names[0]}, steps {first} to {last}")
            names = [f"  {_name(line.label)}" for line in panel.lines]
        indent = max(map(len, names))
        room = min(max(_LEAST_WIDTH, width - indent - 24), last - first + 1)
        together = [] if panel.logarithmic else _values(panel.lines)
        for name, line in zip(names, panel.lines, strict=True):
            name = name.ljust(indent)
            values = _values([line])
            if not values:
                lines.append(f"{name}  {line.without_values}")
                continue
            scale = together or values
            graph = _Graph(first, last, min(scale), max(scale), room)
            lines.append(f"{name} {values[0]:>10.4g} {graph.drawn(line, levels)} {values[-1]:.4g}")
            if cuts := _cuts(line):
                said = ", ".join(map(str, cuts[:8])) + (" ..." if len(cuts) > 8 else "")
                marks = "".join(
                    "^" if place in map(graph.column, cuts) else " " for place in range(room)
                )
                lines.append(f"{' ' * (indent + 12)}{marks} interrupted at {said}")
    return lines


class _Graph(NamedTuple):
    """The steps and the values between which lines are drawn, and the number of columns."""

    first: int
    last: int
    low: float
    high: float
    width: int

    def column(self, step: int) -> int:
        return (step - self.first) * (self.width - 1) // max(1, self.last - self.first)

    def level(self, value: float, levels: str) -> str:
        low, high = self.low, self.high
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return levels[min(len(levels) - 1, int(share * len(levels)))]

    def drawn(self, line: PlotLine, levels: str) -> str:
        """The mean of the values in each column; an empty one has that of the one before it."""
        found: dict[int, list[float | None]] = {}
        for step, value in line.points:
            found.setdefault(self.column(step), []).append(value)
        text, character = "", " "
        for place in range(self.width):
            if place in found:
                values = [value for value in found[place] if value is not None]
                mean = sum(value / len(values) for value in values)
                character = self.level(mean, levels) if values else " "
            text += character if place <= max(found) else " "
        return text


def _values(lines: Sequence[PlotLine]) -> list[float]:
    return [value for line in lines for _, value in line.points if value is not None]


def _cuts(line: PlotLine) -> list[int]:
    """The steps at which a line was interrupted."""
    first, last = line.points[0][0], line.points[-1][0]
    return sorted({a.end for a in line.attempts if a.interrupted and first <= a.end <= last})


def _name(text: str) -> str:
    shown = visible(text).replace("\n", "\\n")
    return shown if len(shown) <= _MOST_NAME else f"{shown[: _MOST_NAME - 3]}..."
