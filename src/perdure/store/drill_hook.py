"""The way by which `perdure drill` enters a program: only if PERDURE_DRILL names its directory.

The drill stands above the store, so its fault injector is loaded by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from perdure.store.storage import Storage

DRILL = "PERDURE_DRILL"
_INJECTOR = "perdure.drill.fault_injection"
_FILES = "perdure.drill.written_files"


class DrillHook(Protocol):
    """What the store asks of the fault injector."""

    def storage(self, location: str | os.PathLike[str] | Storage) -> Storage:
        """The storage to use in place of the one at `location`."""
        ...

    def note(self, event: str, where: str, **fields: Any) -> None:
        """Is called with what a program gives the manager of a run directory: "recipe", "retention"."""
        ...

    @property
    def traced(self) -> int | None:
        """The step that is compared with that of another run; it counts finished steps, as `save`."""
        ...

    @property
    def finished(self) -> int:
        """The last step that was reported."""
        ...

    def trace(self, part: str, number: int | None, digests: Mapping[str, str]) -> None:
        """Is called with the digests of the leaves of a part, of a logical replica if it is one's."""
        ...

    @property
    def is_doctor(self) -> bool:
        """Whether the two calls below are wanted."""
        ...

    def recorded(self, where: str, step: int, leaves: Mapping[str, str]) -> None:
        """Is called with the digests of the leaves of a state that a program saves or records."""
        ...

    def checked_step(self, results: list[dict[str, Any]]) -> None:
        """Is called with all that was computed for a check of the first step; ends the program."""
        ...


def drill_hook() -> DrillHook | None:
    """The fault injector of this process; None, and nothing is imported, outside of a drill."""
    directory = os.environ.get(DRILL)
    return import_module(_INJECTOR).fault_injector(directory) if directory else None


if _directory := os.environ.get(DRILL):  # before the program writes anything
    import_module(_FILES).watch_files(_directory)
