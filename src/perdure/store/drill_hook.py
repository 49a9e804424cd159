"""The way by which `perdure drill` enters a program: only if PERDURE_DRILL names its directory.

The drill stands above the store, so its fault injector is loaded by its name.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

DRILL = "PERDURE_DRILL"
_INJECTOR = "perdure.drill.fault_injection"
_FILES = "perdure.drill.written_files"


def drill_hook() -> Any:
    """The `FaultInjector` of this process; None, and nothing is imported, outside of a drill."""
    directory = os.environ.get(DRILL)
    return import_module(_INJECTOR).fault_injector(directory) if directory else None


if _directory := os.environ.get(DRILL):  # before the program writes anything
    import_module(_FILES).watch_files(_directory)
