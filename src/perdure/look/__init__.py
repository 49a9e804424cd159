"""Reads run directories without the model's code or an ML framework: lists, shows, compares.

Nothing is changed; memory is that of a few chunks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpoint.address import open_checkpoint
    from perdure.look.checkpoint_diff import diff
    from perdure.look.leaf_reader import (
        origin,
        read_array,
        read_elements,
        scalar_value,
        select_leaves,
    )
    from perdure.look.leaf_stats import stats
    from perdure.look.listing import list_run, tree

# Imported at first use, because most commands need few of them; the others are in `leaf_reader`.
_HOMES = {
    "diff": "perdure.look.checkpoint_diff",
    "list_run": "perdure.look.listing",
    "open_checkpoint": "perdure.checkpoint.address",
    "stats": "perdure.look.leaf_stats",
    "tree": "perdure.look.listing",
}

__all__ = [
    "diff",
    "list_run",
    "open_checkpoint",
    "origin",
    "read_array",
    "read_elements",
    "scalar_value",
    "select_leaves",
    "stats",
    "tree",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "perdure.look.leaf_reader")), name)
    raise AttributeError(f"module 'perdure.look' has no attribute {name!r}")
