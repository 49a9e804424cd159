"""How much each layer changed between the kept checkpoints: computed, and drawn as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from perdure.checkpoint.address import StoredCheckpoint
from perdure.look.natural_order import natural_key
from perdure.report.html_page import Html, joined, note, path_text, scroll, tag
from perdure.report.leaf_changes import (
    DAMAGED,
    SAME,
    Change,
    Problems,
    change_ratio,
    float_leaves_of_each,
    leaf_changes,
)
from perdure.report.page_style import LEVELS

MOST_COLUMNS = 24
MOST_ROWS = 40


def changes_document(
    checkpoints: Sequence[StoredCheckpoint],
    leaves: str | Iterable[str] | None = None,
    problems: Problems | None = None,
) -> dict[str, Any]:
    """The relative change of each layer from one checkpoint to the next, in plain values.

    A layer is the leaves with the same first parts of their path, as many parts as give at most 40
    layers. Of more than 25 checkpoints, 25 are compared, spread evenly.

    Args:
        checkpoints: Readable checkpoints of one run, oldest first.
        leaves: A pattern, or several; all leaves by default.
        problems: Gets the checkpoints that are found damaged or that cannot be read.

    Raises:
        ArgumentError: A pattern selects nothing.
    """
    chosen = _spread(checkpoints, MOST_COLUMNS + 1)
    entries = float_leaves_of_each(chosen, leaves)
    layers = layers_of(path for each in entries for path in each)
    columns: list[dict[str, float | str]] = []
    for number, (before, after) in enumerate(pairwise(chosen)):
        found = leaf_changes(before, after, (entries[number], entries[number + 1]), problems)
        grouped: dict[str, list[Change | str]] = {}
        for path, change in found.items():
            grouped.setdefault(layers[path], []).append(change)
        columns.append({layer: change_ratio(changes) for layer, changes in grouped.items()})
    names = sorted(set(layers.values()), key=natural_key)
    return {
        "steps": [[before.step, after.step] for before, after in pairwise(chosen)],
        "checkpoints": len(checkpoints),
        "left_out": max(0, len(names) - MOST_ROWS),
        "layers": [
            {"layer": name, "changes": [column.get(name) for column in columns]}
            for name in names[:MOST_ROWS]
        ],
    }


def layers_of(paths: Iterable[str], most: int = MOST_ROWS) -> dict[str, str]:
    """The layer of each leaf: as many first parts of its path as give at most `most` layers."""
    paths = dict.fromkeys(paths)
    depth, deepest = 1, max((path.count("/") + 1 for path in paths), default=1)
    while depth < deepest and len({_head(path, depth + 1) for path in paths}) <= most:
        depth += 1
    return {path: _head(path, depth) for path in paths}


def _head(path: str, depth: int) -> str:
    return "/".join(path.split("/")[:depth])


def _spread(checkpoints: Sequence[StoredCheckpoint], most: int) -> list[StoredCheckpoint]:
    if len(checkpoints) <= most:
        return list(checkpoints)
    return [checkpoints[n * (len(checkpoints) - 1) // (most - 1)] for n in range(most)]


def heat_map(document: Mapping[str, Any]) -> Html:
    """The table of `changes_document`; empty if nothing can be compared."""
    if not document["steps"] or not document["layers"]:
        return Html("")
    numbers = [
        change
        for row in document["layers"]
        for change in row["changes"]
        if isinstance(change, float) and change > 0
    ]
    scale = _Scale(numbers)
    head = [tag("th", "layer", scope="col", style="text-align:left")] + [
        tag(
            "th",
            f"\N{RIGHTWARDS ARROW}{after}",
            scope="col",
            title=f"from step {before} to {after}",
        )
        for before, after in document["steps"]
    ]
    rows = [
        tag(
            "tr",
            tag("th", path_text(row["layer"]), scope="row", title=row["layer"]),
            *[_cell(change, scale) for change in row["changes"]],
        )
        for row in document["layers"]
    ]
    grid = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="heat")
    return joined(
        [
            scroll(grid, "Relative change of each layer between checkpoints"),
            scale.legend(),
            note(
                "Each number is the norm of the difference over the norm before, of the leaves of the "
                "layer that changed. = stands for equal bits, known from the hashes without a read."
            ),
            note(_left_out(document)) if _left_out(document) else None,
        ]
    )


def _left_out(document: Mapping[str, Any]) -> str:
    parts = []
    shown = len(document["steps"]) + 1
    if shown < document["checkpoints"]:
        parts.append(f"{shown} of {document['checkpoints']} checkpoints are compared.")
    if document["left_out"]:
        parts.append(
            f"{document['left_out']} more layers are left out; --leaves PATTERN selects others."
        )
    return " ".join(parts)


def _cell(change: float | str | None, scale: _Scale) -> Html:
    if isinstance(change, str):
        if change == SAME:
            return tag("td", "=", class_="same", title="equal bits")
        return tag("td", change, class_="bad" if change == DAMAGED else "none")
    if change is None:
        return tag("td", "", class_="none")
    return tag(
        "td", f"{change:.1e}" if change < 0.001 else f"{change:.3f}", class_=scale.kind(change)
    )


class _Scale:
    """A logarithmic scale over the numbers of one table, of a factor of ten at least."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._low = math.log10(min(numbers, default=0.01))
        self._high = max(self._low + 1.0, math.log10(max(numbers, default=1.0)))

    def kind(self, change: float) -> str:
        """The class of the colour of a number."""
        share = (math.log10(change) - self._low) / (self._high - self._low) if change > 0 else 0.0
        return f"l{min(LEVELS - 1, max(0, int(share * LEVELS)))}"

    def legend(self) -> Html:
        """The colours between the smallest and the largest number."""
        swatches = [tag("i", class_=f"swatch l{level}") for level in range(LEVELS)]
        low, high = (tag("span", f"{10**end:.1e}") for end in (self._low, self._high))
        return tag("div", low, tag("span", *swatches, style="gap:0"), high, class_="legend")
