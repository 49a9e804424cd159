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
    """The lines of text, `width` characters each; `levels` are the characters from low to high."""
    lines: list[str] = []
    for panel in panels:
        steps = [step for line in panel.lines for step, _ in line.points]
        first, last = min(steps, default=0), max(steps, default=0)
        names = [_name(panel.title)]
        if panel.has_names:
            lines.append(f"{names[0]}, steps {first} to {last}" if steps else names[0])
            names = [f"  {_name(line.label)}" for line in panel.lines]
        indent = max(map(len, names), default=0)
        room = min(max(_LEAST_WIDTH, width - indent - 24), last - first + 1)
        together = [] if panel.scale_of_each else _values(panel.lines)
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
        """The mean of the values in each column; one without a step has that of the column before
        it.
        """
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
