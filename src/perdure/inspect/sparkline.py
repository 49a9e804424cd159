"""Panels as lines of text: a small graph of each line, with the places of its interruptions below."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.inspect.html_page import visible
from perdure.inspect.plot_panels import Panel, PlotLine

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
PLAIN = "_.-=+*%#"
"""For a terminal whose encoding has no blocks."""

_MOST_NAME = 40
_LEAST_WIDTH = 10


def sparklines(panels: Sequence[Panel], width: int, levels: str = BLOCKS) -> list[str]:
    """The lines of text.

    Args:
        panels: What to draw.
        width: Characters of a line.
        levels: The characters from low to high.
    """
    lines: list[str] = []
    for panel in panels:
        several = len(panel.lines) > 1
        if several:
            lines.append(_name(panel.title))
        names = [
            f"  {_name(line.label)}" if several else _name(panel.title) for line in panel.lines
        ]
        indent = max(map(len, names), default=0)
        for name, line in zip(names, panel.lines, strict=True):
            lines += _line(name.ljust(indent), line, max(_LEAST_WIDTH, width - indent - 24), levels)
    return lines


def _name(text: str) -> str:
    shown = visible(text).replace("\n", "\\n")
    return shown if len(shown) <= _MOST_NAME else f"{shown[: _MOST_NAME - 3]}..."


def _line(name: str, line: PlotLine, width: int, levels: str) -> list[str]:
    values = [value for _, value in line.points if value is not None]
    if not values:
        return [f"{name}  no finite value"]
    first, last = line.points[0][0], line.points[-1][0]
    width = min(width, max(1, last - first + 1))
    columns = _columns(line, width)
    low, high = min(values), max(values)
    drawn = "".join(" " if value is None else _level(value, low, high, levels) for value in columns)
    ends = f"{values[0]:>10.4g} {drawn} {values[-1]:.4g}"
    lines = [f"{name} {ends}"]
    cuts = sorted({a.end for a in line.attempts if a.interrupted and first <= a.end <= last})
    if cuts:
        marks = [" "] * width
        for step in cuts:
            marks[_place(step, first, last, width)] = "^"
        said = ", ".join(map(str, cuts[:8])) + (" ..." if len(cuts) > 8 else "")
        lines.append(f"{' ' * len(name)} {' ' * 11}{''.join(marks)} interrupted at {said}")
    return lines


def _columns(line: PlotLine, width: int) -> list[float | None]:
    """The mean of the values in each column; a column without a value has the one before it."""
    first, last = line.points[0][0], line.points[-1][0]
    sums: list[list[float]] = [[] for _ in range(width)]
    broken = [False] * width
    for step, value in line.points:
        place = _place(step, first, last, width)
        if value is None:
            broken[place] = True
        else:
            sums[place].append(value)
    columns: list[float | None] = []
    for values, is_broken in zip(sums, broken, strict=True):
        if values:
            columns.append(sum(value / len(values) for value in values))
        else:
            columns.append(None if is_broken or not columns else columns[-1])
    return columns


def _place(step: int, first: int, last: int, width: int) -> int:
    return (step - first) * (width - 1) // max(1, last - first)


def _level(value: float, low: float, high: float, levels: str) -> str:
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    return levels[min(len(levels) - 1, int(share * len(levels)))]
