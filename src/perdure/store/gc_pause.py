"""Python's cycle collector, kept away from the bookkeeping of a save.

A save makes several objects for each leaf, none of them in a cycle. Because of their number the
collector would look at every object of the process, several times: a third of the time of a save of
10,000 leaves.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY_LEAVES = 1000
"""Fewer give the collector nothing to do."""

SHORT_BYTES = 64 * 1024 * 1024
"""Saves of up to so much pause it from their beginning to their end. It runs as soon as a pause is
over, because what was made meanwhile counts, so that many pauses would be as many collections."""


@contextmanager
def gc_paused(leaves: int = MANY_LEAVES) -> Iterator[None]:
    """Keep the collector, if it is on and there are many leaves, from running, in all threads."""
    paused = leaves >= MANY_LEAVES and gc.isenabled()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
