"""Warnings that point to the user's line, however many calls of perdure are above it."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_caller(text: str) -> None:
    """Issue a `UserWarning` at the innermost line of the stack that is not in perdure."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
