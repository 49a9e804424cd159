"""Python's cycle collector, kept away from the bookkeeping of a save.

A save makes several objects for each leaf, none in a cycle: without this, a third of the time of a
save of 10,000 leaves is the collector's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from perdure.runtime.system import at_fork

MANY_LEAVES = 1000
"""Fewer give the collector nothing to do."""

SHORT_BYTES = 64 * 1024 * 1024
"""Saves of up to so much pause it from their beginning to their end. It runs as soon as a pause is
over, because what was made meanwhile counts, so that many pauses would be as many collections."""

_is_paused = False
"""Whether it is off because of a pause here."""


@contextmanager
def gc_paused(leaves: int = MANY_LEAVES) -> Iterator[None]:
    """Keep the collector, if it is on and there are many leaves, from running, in all threads. A
    pause that begins in another one ends with that."""
    global _is_paused
    if leaves < MANY_LEAVES or not gc.isenabled():
        yield
        return
    _is_paused = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _is_paused = False


def _in_child() -> None:
    """The other threads of the parent are not in a forked child, and would never end their pauses."""
    if _is_paused:
        gc.enable()


at_fork(after_in_child=_in_child)
