"""Short lists, counted nouns and safe characters for messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

FEW = 5  # items that a message names; `--json` has all


def quoted(path: object) -> str:
    """A path in a command that a message recommends, as a shell takes it."""
    return shlex.quote(str(path))


def few(items: Iterable[object], limit: int = FEW, separator: str = ", ") -> str:
    """The first `limit` items and the number of the others: `a, b and 12 more`."""
    known = [*items]
    shown = separator.join(map(str, known[:limit]))
    more = len(known) - limit
    return f"{shown} and {more:,} more" if more > 0 else shown


def printable(text: str, most: int | None = None) -> str:
    """`text` with escapes in place of characters that a terminal obeys, cut after `most` characters."""
    cut = ""
    if most is not None and len(text) > most:
        cut = f"... ({len(text)} characters)"
        text = text[:most]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text + cut


def printable_lines(text: str) -> str:
    """The same for each line."""
    return "\n".join(map(printable, text.split("\n")))


def counted(number: int, one: str, several: str | None = None) -> str:
    """A number with its noun: `1 step`, `2,000 leaves`. The plural is "s" by default."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
