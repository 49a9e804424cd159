"""Tables for people: aligned text in a terminal of any width, HTML in a notebook."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST_CHARACTERS = 2000
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class Table:
    """A header and rows of cells. Columns of numbers are aligned to the right.

    Attributes:
        header: The name of each column.
        rows: The cells of each row; None is an empty cell.
        optional: Columns that a narrow terminal does without, the first one first.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    optional: Sequence[str] = ()

    def text(self, width: int | None = None) -> str:
        """The table as text.

        If a row needs more than `width` characters, optional columns are left out; if that is not
        enough, each cell has a line, and none is left out.
        """
        cells = [list(self.header)]
        cells += [[printable(_text(cell)) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        left = list(range(len(widths)))
        for name in self.optional:
            if width is not None and _line_width(widths, left) > width:
                left.remove(list(self.header).index(name))
        if width is not None and _line_width(widths, left) > width:
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
        right = self._right()
        rows = [_row("th", self.header, right)]
        rows += [_row("td", [printable(_text(cell)) for cell in row], right) for row in self.rows]
        return f"<table>{''.join(rows)}</table>"

    def _right(self) -> list[bool]:
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.header)
        return [any(_is_number(cell) for cell in column) for column in columns]


class Shown:
    """Base of a result: `str` and a notebook show the blocks of `_blocks`, text and tables."""

    def _blocks(self) -> list[str | Table]:
        raise NotImplementedError

    def text(self, width: int | None = None) -> str:
        """The blocks as text, with tables for a terminal of `width` characters."""
        return "\n".join(
            block.text(width) if isinstance(block, Table) else visible(block)
            for block in self._blocks()
        )

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return "".join(
            block._repr_html_()
            if isinstance(block, Table)
            else f"<p>{html.escape(visible(block))}</p>"
            for block in self._blocks()
        )


def plain(value: Any) -> Any:
    """A result as JSON can hold it: the texts NaN, Infinity and -Infinity for such numbers."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def printable(text: str, most: int | None = None) -> str:
    """`text` with escapes in place of characters that a terminal obeys, cut after `most` characters."""
    cut = ""
    if most is not None and len(text) > most:
        cut = f"... ({len(text)} characters)"
        text = text[:most]
    if text.isprintable():
        return text + cut
    return (
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + cut
    )


def visible(value: object) -> str:
    """The text of a value, in which nothing is hidden: its lines as `printable`, cut if it is long."""
    text = str(value)
    cut = f"... ({len(text)} characters)" if len(text) > _MOST_CHARACTERS else ""
    return "\n".join(map(printable, text[:_MOST_CHARACTERS].split("\n"))) + cut


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A key for sorting: numbers in a name compare as numbers."""
    # Very long digits stay text: `int` refuses them.
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() and len(part) < 20 else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
    ]


def size_text(nbytes: int) -> str:
    """A size in bytes as text, such as `1.5 MiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def share_text(part: int, whole: int) -> str:
    """A share in percent, such as `12.5%`; empty if there is no whole."""
    return f"{100 * part / whole:.1f}%" if whole else ""


def _line_width(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[n] + 2 for n in columns) - 2


def _records(cells: Sequence[Sequence[str]]) -> str:
    """Each row as lines of a name and a value, without the empty cells."""
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


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    texts = (
        f'<{tag} style="text-align:{"right" if to_right else "left"};white-space:pre">'
        f"{html.escape(cell)}</{tag}>"
        for cell, to_right in zip(cells, right, strict=True)
    )
    return f"<tr>{''.join(texts)}</tr>"
