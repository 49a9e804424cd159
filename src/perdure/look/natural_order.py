"""Names in the order that a person expects: `layer2` before `layer10`."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A key for sorting: numbers in a name compare as numbers."""
    # Very long digits stay text: `int` refuses them.
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() and len(part) < 20 else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
    ]
