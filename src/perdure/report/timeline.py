"""A timeline: a line for each start of a run, its attempts as bars, and what hit them as marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.report.html_page import Html, duration, joined, tag


@dataclass(frozen=True)
class Bar:
    """One attempt: when it began and how long it took, in seconds, its label and its tooltip."""

    began: float
    seconds: float
    text: str
    title: str


@dataclass(frozen=True)
class Mark:
    """One event at a time in seconds."""

    at: float
    title: str


@dataclass(frozen=True)
class Line:
    """One line of a timeline. `kind` colours its label: good, bad, warn or plain."""

    label: str
    kind: str
    bars: Sequence[Bar]
    marks: Sequence[Mark]


def timeline(lines: Sequence[Line], what: str) -> Html:
    """The lines on one scale, which begins at the start of each.

    Args:
        lines: What to draw.
        what: What the marks are, for the legend.
    """
    ends = [bar.began + bar.seconds for line in lines for bar in line.bars]
    longest = max(ends, default=0.0) or 1.0

    def place(seconds: float) -> str:
        return f"{100 * max(0.0, min(1.0, seconds / longest)):.2f}%"

    rows = []
    for line in lines:
        bars = [
            tag(
                "div",
                bar.text,
                class_="bar",
                title=bar.title,
                style=f"left:{place(bar.began)};width:{place(bar.seconds)}",
            )
            for bar in line.bars
        ]
        marks = [
            tag("div", class_="mark", title=mark.title, style=f"left:{place(mark.at)}")
            for mark in line.marks
        ]
        label = tag("div", tag("span", line.label, class_=f"badge {line.kind}"), class_="label")
        rows.append(tag("div", label, tag("div", *bars, *marks, class_="track"), class_="row"))
    axis = tag("div", tag("span", "0 s"), tag("span", duration(longest)), class_="axis")
    legend = tag(
        "div",
        tag("span", tag("i", class_="key barkey"), "an attempt"),
        tag("span", tag("i", class_="key markkey"), what),
        class_="legend",
    )
    return joined([legend, *rows, tag("div", tag("div"), axis, class_="row")])
