"""Takes leaves out of run directories and into new ones: averages, exports, imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.convert.averaging import average
    from perdure.convert.exporting import export
    from perdure.convert.importing import import_run
    from perdure.convert.leaf_names import NameMap

# Imported at first use, because most commands need few of them.
_HOMES = {
    "NameMap": "perdure.convert.leaf_names",
    "average": "perdure.convert.averaging",
    "export": "perdure.convert.exporting",
    "import_run": "perdure.convert.importing",
}

__all__ = [
    "NameMap",
    "average",
    "export",
    "import_run",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perdure.convert' has no attribute {name!r}")
