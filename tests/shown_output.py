"""Compares the output that a page shows with what a program printed."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?<![A-Za-z])-?\d[\w.:+-]*|\b[0-9a-f]{8,}\b")


def form(line: str) -> str:
    """The line without its numbers, dates, hashes and widths of columns."""
    return " ".join(NUMBER.sub("#", line).split())


def missing_lines(shown: str, printed: str) -> list[str]:
    """The lines of a page that were not printed, in their order; `...` at an end stands for more."""
    rest = [form(line) for line in printed.splitlines()]
    missing = []
    for line in shown.splitlines():
        wanted = form(line.removesuffix("..."))
        matches = (
            n
            for n, found in enumerate(rest)
            if found == form(line) or (line.endswith("...") and found.startswith(wanted))
        )
        if (at := next(matches, -1)) >= 0:
            del rest[: at + 1]
        else:
            missing.append(line)
    return missing
