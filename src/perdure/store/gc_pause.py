"""Python's cycle collector, kept away from the bookkeeping of a save.

A save makes several objects for each leaf, none in a cycle: without this, a third of the time of a
save of 10,000 leaves is the collector's.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from perdure.runtime.system import at_fork

MANY_LEAVES = 1000
"""Fewer give the collector nothing to do."""

SHORT_BYTES = 64 * 1024 * 1024
"""Saves of up to so much pause it from their beginning to their end. It runs as soon as a pause is
over, because what was made meanwhile counts, so that many pauses would be as many collections."""


_guard = threading.RLock()  # a finalizer or a signal handler may begin a pause at any line
_count = 0
"""How many pauses there are in all threads; the last one to end gives the collector back."""
_was_on = False


@contextmanager
def gc_paused(leaves: int = MANY_LEAVES) -> Iterator[None]:
    """Keep the collector, if it is on and there are many leaves, from running, in all threads."""
    global _count, _was_on
    if leaves < MANY_LEAVES:
        yield
        return
    with _guard:
        _count += 1
        if _count == 1:
            _was_on = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _guard:
            _count = max(0, _count - 1)
            _give_back()


def _give_back() -> None:
    global _was_on
    if not _count and _was_on:
        _was_on = False
        gc.enable()


def _in_child() -> None:
    """The other threads of the parent are not in a forked child, and would never end their pauses."""
    global _guard, _count
    _guard, _count = threading.RLock(), 0  # one of them may have held it
    _give_back()


at_fork(after_in_child=_in_child)
