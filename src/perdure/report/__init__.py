"""Draws runs: a page for a browser, figures of matplotlib, a line of text for a terminal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.report.run_plot import plot
    from perdure.report.run_report import report

# Imported at first use, because most commands need few of them.
_HOMES = {
    "plot": "perdure.report.run_plot",
    "report": "perdure.report.run_report",
}

__all__ = [
    "plot",
    "report",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perdure.report' has no attribute {name!r}")
