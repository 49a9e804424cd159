"""Short lists and counted nouns for messages."""

from __future__ import annotations

from collections.abc import Iterable

FEW = 5  # items that a message names; `--json` has all


def few(items: Iterable[object], limit: int = FEW, separator: str = ", ") -> str:
    """The first `limit` items and the number of the others: `a, b and 12 more`."""
    known = [*items]
    shown = separator.join(map(str, known[:limit]))
    more = len(known) - limit
    return f"{shown} and {more:,} more" if more > 0 else shown


def counted(number: int, one: str, several: str | None = None) -> str:
    """A number with its noun: `1 step`, `2,000 leaves`. The plural is "s" by default."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
