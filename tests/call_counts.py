"""Counts the calls of an action, where a time would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls(action: Callable[[], Any]) -> int:
    """How many functions `action` calls, those of C included."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count
