"""Python's cycle collector, kept away from the bookkeeping of a save.

A save makes several objects for each leaf, none of them in a cycle. Because of their number the
collector would look at every object of the process, several times: a third of the time of a save of
10,000 leaves.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MANY_LEAVES = 1000
"""Fewer give the collector nothing to do."""

SHORT_BYTES = 64 * 1024 * 1024
"""Saves of up to so much pause it from their beginning to their end. It runs as soon as a pause is
over, because what was made meanwhile counts, so that many pauses would be as many collections."""


class _Pauses:
    """How many pauses there are in all threads; the last one to end gives the collector back.

    A finalizer or a signal handler may begin a pause at any line of these.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self.guard:
            self._count += 1
            if self._count == 1:
                self._was_on = gc.isenabled()
                gc.disable()

    def end(self) -> None:
        with self.guard:
            if self._count == 1:
                self.give_back()
            self._count -= 1

    def give_back(self) -> None:
        if self._was_on:
            self._was_on = False
            gc.enable()


_pauses = _Pauses()


@contextmanager
def gc_paused(leaves: int = MANY_LEAVES) -> Iterator[None]:
    """Keep the collector, if it is on and there are many leaves, from running, in all threads."""
    if leaves < MANY_LEAVES:
        yield
        return
    pauses = _pauses
    pauses.begin()
    try:
        yield
    finally:
        pauses.end()


def _in_child() -> None:
    """The other threads of the parent are not in a forked child, and would never end their pauses."""
    global _pauses
    _pauses.give_back()
    _pauses.guard = threading.RLock()  # one of them may have held it
    _pauses = _Pauses()


os.register_at_fork(after_in_child=_in_child)
