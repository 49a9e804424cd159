"""The door for `perdure drill`: shut unless PERDURE_DRILL names the directory of one of its runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.store.drilled import Drilled

DRILL = "PERDURE_DRILL"


def drill() -> Drilled | None:
    """The drill that this process is part of; None outside one, and then nothing is imported."""
    where = os.environ.get(DRILL)
    if not where:
        return None
    from perdure.store.drilled import attached

    return attached(where)


def drilled_clock(clock: Callable[[], float]) -> Callable[[], float]:
    """`clock`, which a drill may let jump; outside of one `clock` itself."""
    drilled = drill()
    return clock if drilled is None else drilled.clock(clock)
