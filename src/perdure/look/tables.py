"""Results for people, as aligned text in a terminal of any width or as HTML in a notebook; as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import chain, repeat
from typing import Any

from perdure.store.format import json_number
from perdure.text import counted, printable, printable_lines

_MOST_CHARACTERS = 2000
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class Table:
    """A header and rows of cells (None is empty); narrow terminals lack `optional` columns."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    optional: Sequence[str] = ()

    def text(self, width: int | None = None) -> str:
        """As text; of a row of more than `width` characters each cell has a line, at the last."""
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        left = list(range(len(widths)))

        def is_too_wide() -> bool:
            return width is not None and sum(widths[n] + 2 for n in left) - 2 > width

        for name in self.optional:
            if is_too_wide():
                left.remove(list(self.header).index(name))
        if is_too_wide():
            return _records(cells)
        right = self._right()
        lines = (
            "  ".join(
                row[n].rjust(widths[n]) if right[n] else row[n].ljust(widths[n]) for n in left
            )
            for row in cells
        )
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        # The styles of notebooks would right-align texts and drop indents.
        sides = ["right" if is_right else "left" for is_right in self._right()]
        rows = [
            "".join(
                f'<{tag} style="text-align:{side};white-space:pre-wrap">{escape(cell)}</{tag}>'
                for cell, side in zip(row, sides, strict=True)
            )
            for row, tag in zip(self._cells(), chain(["th"], repeat("td")), strict=False)
        ]
        return f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"

    def _cells(self) -> list[list[str]]:
        return [list(self.header), *([printable(_text(cell)) for cell in row] for row in self.rows)]

    def _right(self) -> list[bool]:
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.header)
        return [any(_is_number(cell) for cell in column) for column in columns]


@dataclass(frozen=True, repr=False)
class Shown:
    """Base of a result: `str`, `repr` and notebooks show the blocks of `_blocks`, text and tables."""

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self)

    def _blocks(self) -> list[str | Table]:
        raise NotImplementedError

    def text(self, width: int | None = None) -> str:
        """The blocks as text, with tables for a terminal of `width` characters."""
        return "\n".join(
            block.text(width) if isinstance(block, Table) else visible(block)
            for block in self._blocks()
        )

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = (
            each._repr_html_() if isinstance(each, Table) else f"<pre>{escape(visible(each))}</pre>"
            for each in self._blocks()
        )
        return "".join(parts).replace("</pre><pre>", "\n")


def plain(value: Any) -> Any:
    """A result as JSON can hold it: the texts NaN, Infinity and -Infinity for such numbers."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return json_number(value) if isinstance(value, float) else value


def visible(value: object) -> str:
    """The text of a value, in which nothing is hidden: its lines as `printable`, cut if it is long."""
    text = str(value)
    cut = f"... ({len(text)} characters)" if len(text) > _MOST_CHARACTERS else ""
    return printable_lines(text[:_MOST_CHARACTERS]) + cut


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A key for sorting: numbers in a name compare as numbers."""
    # Very long digits stay text: `int` refuses them.
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() and len(part) < 20 else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
    ]


def size_text(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def share_text(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""


def leaves_text(count: int, nbytes: int) -> str:
    return f"{counted(count, 'leaf', 'leaves')}, {size_text(nbytes)}"


def _records(cells: Sequence[Sequence[str]]) -> str:
    header, *rows = cells
    indent = max(map(len, header))
    records = (
        "\n".join(
            f"{name.ljust(indent)}  {cell}" for name, cell in zip(header, row, strict=True) if cell
        )
        for row in rows
    )
    return "\n\n".join(records)


def _is_number(cell: object) -> bool:
    if isinstance(cell, str):
        return cell.endswith(("%", "iB", " B"))
    return isinstance(cell, (int, float))


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return format(cell, ".6g")
    return "" if cell is None else str(cell)
