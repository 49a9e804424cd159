"""Draws the figures of a benchmark: `python benchmarks/bars.py build/bench-store.json` writes the SVG.

Every benchmark does that by itself beside its JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

LABEL, BAR, WIDTH, HEIGHT = 560, 280, 1240, 24
STYLE = """text { font: 12px system-ui, sans-serif; fill: currentColor }
.value { fill: #009688 } .limit { stroke: #e64900; stroke-width: 2 } .note { opacity: 0.65 }"""


def draw(rows: Iterable[Mapping[str, Any]]) -> str:
    """One bar for each row with a figure, to a scale for each unit; a line marks the limit."""
    figures = [row for row in rows if _is_drawn(row["value"])]
    longest: dict[str, float] = {}
    for row in figures:
        limit = row["limit"] if _is_drawn(row["limit"]) else 0
        longest[row["unit"]] = max(longest.get(row["unit"], 0), row["value"], limit)
    parts = [_bar(number, row, longest[row["unit"]]) for number, row in enumerate(figures)]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * len(figures) + 8}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([svg, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def _is_drawn(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _bar(number: int, row: Mapping[str, Any], longest: float) -> str:
    top, width = 4 + HEIGHT * number, BAR * row["value"] / longest
    text = f"{row['value']:.3g} {row['unit']}"
    lines = [
        f'<text x="{LABEL - 8}" y="{top + 14}" text-anchor="end">{escape(row["what"][:88])}</text>',
        f'<rect class="value" x="{LABEL}" y="{top + 3}" width="{width:.1f}" height="14"/>',
        f'<text x="{LABEL + BAR + 8}" y="{top + 14}">{escape(text)}</text>',
    ]
    if _is_drawn(row["limit"]):
        at = LABEL + BAR * row["limit"] / longest
        title = escape(f"{row['against']} {row['limit']:.3g} {row['unit']}".strip())
        lines.append(
            f'<path class="limit" d="M{at:.1f} {top} v20"><title>{title}</title></path>'
            f'<text class="note" x="{LABEL + BAR + 96}" y="{top + 14}">{title[:44]}</text>'
        )
    return "\n".join(lines)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".svg").write_text(draw(json.loads(source.read_text())))
