"""The drill: runs a user's program under injected faults and checks that it ends with the same bits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.drill.drill import run_drill
    from perdure.drill.drill_report import DrillOptions, DrillReport, DrillStopped
    from perdure.drill.fault_plan import KINDS

# Resolved on first use: a drilled program loads the fault injector and nothing else of this package.
_HOMES = {
    "KINDS": "perdure.drill.fault_plan",
    "DrillOptions": "perdure.drill.drill_report",
    "DrillReport": "perdure.drill.drill_report",
    "DrillStopped": "perdure.drill.drill_report",
    "run_drill": "perdure.drill.drill",
}

__all__ = ["KINDS", "DrillOptions", "DrillReport", "DrillStopped", "run_drill"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perdure.drill' has no attribute {name!r}")
