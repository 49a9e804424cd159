"""The table of a benchmark: its rows, their comparisons, and how they are printed and kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bars import draw

Row = dict[str, Any]
KEYS = ("what", "value", "unit", "spread", "against", "limit", "ratio", "reach", "met")


def row(what: str, value: float | None, unit: str, spread: str = "", **more: Any) -> Row:
    """A row with a figure; without `reach` and `met` it is only reported."""
    filled = {"against": "", "limit": None, "ratio": None, "reach": "", "met": None, **more}
    return {"what": what, "value": value, "unit": unit, "spread": spread, **filled}


def compared(row: Row, against: str, limit: float, *, least: float = 0.0, most: float = 1e9) -> Row:
    """The row with its ratio to `limit`, whose goal is to be between `least` and `most`."""
    ratio = row["value"] / limit
    reach = f">= {least:g}x" if least else f"<= {most:g}x" if most != 1 else f"<= {limit:g}"
    # Time added to a loop may be below 0, so that the ratio is negative.
    met = ratio <= most and (not least or ratio >= least)
    return {**row, "against": against, "limit": limit, "ratio": ratio, "reach": reach, "met": met}


def installed(modules: tuple[str, ...]) -> bool:
    """Whether the modules of a peer are installed."""

    def is_installed(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return all(map(is_installed, modules))


def finish(rows: Iterable[Row], out: Path) -> int:
    """Print and keep each row when it is known, print the table at the end; return the exit status."""
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    out.parent.mkdir(parents=True, exist_ok=True)
    table: list[Row] = []
    for figure in rows:
        table.append({key: figure.get(key) for key in KEYS})
        out.write_text(json.dumps(table, indent=1) + "\n")
        text = f"{figure['what']}: {_text(figure['value'])} {figure['unit']} {_text(figure['met'])}"
        print(f"  {text}", file=sys.stderr, flush=True)
    out.with_suffix(".svg").write_text(draw(table))
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}\n")
    cells = [list(KEYS), *[[_text(figure[key]) for key in KEYS] for figure in table]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(KEYS))]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip())
    return 0


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
