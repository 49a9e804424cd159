"""Panels as lines of text: a small graph of each line, with the places of its interruptions below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.look.tables import visible
from perdure.report.panels import Panel, PlotLine

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
PLAIN = "_.-=+*%#"
"""For a terminal whose encoding has no blocks."""

_MOST_NAME = 40
_LEAST_WIDTH = 10


def text_graph(panels: Sequence[Panel], width: int, levels: str = BLOCKS) -> list[str]:
    """The lines of text.

    Args:
        panels: What to draw.
        width: Characters of a line.
        levels: The characters from low to high.
    """
    lines: list[str] = []
    for panel in panels:
        axis = _axis(panel.lines)
        several = panel.has_names
        if several:
            lines.append(_name(panel.title) + (f", steps {axis[0]} to {axis[1]}" if axis else ""))
        names = [
            f"  {_name(line.label)}" if several else _name(panel.title) for line in panel.lines
        ]
        indent = max(map(len, names), default=0)
        room = max(_LEAST_WIDTH, width - indent - 24)
        every = [] if panel.scale_of_each else _values(panel.lines)
        for name, line in zip(names, panel.lines, strict=True):
            values = _values([line])
            if axis is None or not values:
                lines.append(f"{name.ljust(indent)}  {line.without_values}")
                continue
            graph = _Graph(*axis, min(every or values), max(every or values), room)
            lines += _line(name.ljust(indent), line, values, graph, levels)
    return lines


class _Graph(NamedTuple):
    """The steps and the values between which a line is drawn, and the most columns."""

    first: int
    last: int
    low: float
    high: float
    room: int

    @property
    def width(self) -> int:
        return min(self.room, max(1, self.last - self.first + 1))

    def column(self, step: int) -> int:
        return (step - self.first) * (self.width - 1) // max(1, self.last - self.first)

    def level(self, value: float, levels: str) -> str:
        low, high = self.low, self.high
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return levels[min(len(levels) - 1, int(share * len(levels)))]


def _axis(lines: Sequence[PlotLine]) -> tuple[int, int] | None:
    """The first and the last step of all lines."""
    steps = [step for line in lines for step, _ in line.points]
    return (min(steps), max(steps)) if steps else None


def _values(lines: Sequence[PlotLine]) -> list[float]:
    return [value for line in lines for _, value in line.points if value is not None]


def _name(text: str) -> str:
    shown = visible(text).replace("\n", "\\n")
    return shown if len(shown) <= _MOST_NAME else f"{shown[: _MOST_NAME - 3]}..."


def _line(
    name: str, line: PlotLine, values: Sequence[float], graph: _Graph, levels: str
) -> list[str]:
    drawn = "".join(
        " " if value is None else graph.level(value, levels) for value in _columns(line, graph)
    )
    lines = [f"{name} {values[0]:>10.4g} {drawn} {values[-1]:.4g}"]
    first, last = line.points[0][0], line.points[-1][0]
    cuts = sorted({a.end for a in line.attempts if a.interrupted and first <= a.end <= last})
    if cuts:
        marks = [" "] * graph.width
        for step in cuts:
            marks[graph.column(step)] = "^"
        said = ", ".join(map(str, cuts[:8])) + (" ..." if len(cuts) > 8 else "")
        lines.append(f"{' ' * len(name)} {' ' * 11}{''.join(marks)} interrupted at {said}")
    return lines


def _columns(line: PlotLine, graph: _Graph) -> list[float | None]:
    """The mean of the values in each column; one without a value has that of the column before it.

    Columns before the first step of the line and after its last one are empty.
    """
    sums: list[list[float]] = [[] for _ in range(graph.width)]
    broken = [False] * graph.width
    for step, value in line.points:
        place = graph.column(step)
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
    last = graph.column(line.points[-1][0])
    return [value if place <= last else None for place, value in enumerate(columns)]
