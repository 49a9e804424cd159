"""What a program reports about one step while `perdure bisect` replays it: digests of every part.

Outside of such a replay nothing here costs more than a look at an environment variable.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from perdure.checkpoint.state_digest import digests_by_path
from perdure.errors import UnsupportedLeafError
from perdure.runtime.process_group import Processes, SingleProcess
from perdure.store.drill_hook import drill_hook


def is_tracing() -> bool:
    """Whether this process replays a step that is compared with that of another run."""
    hook = drill_hook()
    return hook is not None and hook.is_tracing()


def is_computing_traced(step: int) -> bool:
    """Whether a strategy, which counts it as `step`, now computes the step that is asked for."""
    hook = drill_hook()
    return hook is not None and hook.is_computing_traced(step)


def trace_recorded(step: int, part: str, value: Any, group: Processes | None = None) -> None:
    """Report a part of a step that the program records, if the parts of this step are asked for.

    Args:
        step: How many steps the state contains after this one.
        part: One of `perdure.drill.step_causes.PARTS`.
        value: A tree; one that has no exact form is left out.
        group: The processes that hold it; None for a single process.
    """
    hook = drill_hook()
    if hook is not None and hook.traces(step):
        trace_part(part, value, group=group)


def trace_part(
    part: str, value: Any, replica: int | None = None, group: Processes | None = None
) -> None:
    """Report a part of the step that is asked for, of a logical replica if it is one's."""
    hook = drill_hook()
    if hook is None:
        return
    with suppress(UnsupportedLeafError):
        digests = digests_by_path(value, group or SingleProcess())
        hook.trace(part, replica, {path: digest.hex for path, digest in digests.items()})
