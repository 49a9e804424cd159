"""A chart of one metric over steps as SVG: a line for each run, interruptions as dashed lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perdure.report.html_page import Html, note, number, tag
from perdure.report.metric_series import Series
from perdure.report.page_style import SERIES

WIDTH, HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 10, 24
_BUCKETS = 180
_DASHES = (None, "6 3", "2 3", "8 3 2 3")


def line_chart(name: str, lines: Sequence[tuple[str, Series, Sequence[int]]]) -> Html:
    """A figure of one metric.

    Args:
        name: The name of the metric.
        lines: For each run its label, its values by step, and the steps at which it was interrupted.
            Runs without a finite value of this metric draw nothing, and keep their colour.
    """
    finite = [[(s, v) for s, v in series if v is not None] for _, series, _ in lines]
    points = [point for line in finite for point in line]
    if not points:
        caption = tag("figcaption", name)
        return tag("figure", caption, tag("p", "no finite value was recorded", class_="note"))
    first, last = min(s for s, _ in points), max(s for s, _ in points)
    low, high = _range(min(v for _, v in points), max(v for _, v in points))

    def x(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - first) / max(1, last - first)

    def y(value: float) -> float:
        # Halves first: the distance of two large numbers may be infinite.
        share = (value / 2 - low / 2) / (high / 2 - low / 2)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    parts = [_grid(value, y(value)) for value in _ticks(low, high)]
    for step in sorted({first, last}):
        anchor = "start" if step == first else "end"
        parts.append(tag("text", step, x=f"{x(step):.1f}", y=HEIGHT - 7, text_anchor=anchor))
    cuts = {step for _, _, steps in lines for step in steps if first <= step <= last}
    parts += [
        tag("line", class_="cut", x1=f"{x(s):.1f}", x2=f"{x(s):.1f}", y1=_TOP, y2=HEIGHT - _BOTTOM)
        for s in sorted(cuts)
    ]
    for index, (line, (_, series, _)) in enumerate(zip(finite, lines, strict=True)):
        parts += [_line(part, index, x, y) for part in _pieces(series)] if line else []
    said = "; ".join(
        f"{label}: {number(line[0][1])} at step {line[0][0]}, "
        f"{number(line[-1][1])} at step {line[-1][0]}"
        for line, (label, _, _) in zip(finite, lines, strict=True)
        if line
    )
    newest = [number(line[-1][1]) for line in finite if line]
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{name} over steps. {said}",
    )
    return tag("figure", tag("figcaption", name, tag("span", " / ".join(newest))), drawing)


def line_key(index: int) -> Html:
    """The key of a line in a legend: its colour, and its dashes if it has some."""
    dash = _dash(index)
    if dash is None:
        return tag("i", class_=f"key k{index % SERIES}")
    line = tag("line", class_=f"s{index % SERIES}", x2=28, y1=3, y2=3, stroke_dasharray=dash)
    return tag("svg", line, class_="key linekey", viewBox="0 0 28 6")


def interruption_legend() -> Html:
    """The legend of the dashed lines."""
    return note("Dashed red lines: steps at which a run was interrupted.")


def _range(low: float, high: float) -> tuple[float, float]:
    if low == high:
        room = abs(low) / 10 or 1.0
        return low - room, high + room
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Round values between the two, at most six."""
    span = high / 2 - low / 2
    unit = 10.0 ** math.floor(math.log10(span)) if span > 0 else 1.0
    for factor in (0.2, 0.5, 1.0, 2.0, 5.0):
        step = unit * factor
        if step and span / step <= 2.5:
            begin, end = math.ceil(low / step), math.floor(high / step)
            return [n * step for n in range(begin, min(end, begin + 6) + 1)]
    return [low, high]


def _grid(value: float, at: float) -> Html:
    label = tag("text", f"{value:.4g}", x=_LEFT - 6, y=f"{at + 4:.1f}", text_anchor="end")
    line = tag("line", class_="grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}")
    return Html(line + label)


def _pieces(series: Series) -> list[list[tuple[int, float]]]:
    """The parts of a series between values that are not finite, each thinned to what can be seen."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in series:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [_thinned(piece) for piece in pieces if piece]


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lowest and the highest point of each of some hundred parts, so that no peak is lost."""
    if len(points) <= 2 * _BUCKETS:
        return points
    kept: list[tuple[int, float]] = []
    for bucket in range(_BUCKETS):
        begin, end = (n * len(points) // _BUCKETS for n in (bucket, bucket + 1))
        part = points[begin:end]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return sorted({points[0], *kept, points[-1]})


def _line(points: list[tuple[int, float]], index: int, x: object, y: object) -> Html:
    assert callable(x)
    assert callable(y)
    colour = f"s{index % SERIES}"
    if len(points) == 1:
        return tag(
            "circle", class_=colour, cx=f"{x(points[0][0]):.1f}", cy=f"{y(points[0][1]):.1f}", r=3
        )
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    return tag("polyline", class_=colour, points=path, stroke_dasharray=_dash(index))


def _dash(index: int) -> str | None:
    return _DASHES[index // SERIES % len(_DASHES)]
