"""Looks inside run directories, and takes things out, without the model's code or an ML framework.

No run that exists is changed; memory is that of a few chunks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpoint.address import (
        StoredCheckpoint,
        open_checkpoint,
        open_checkpoints,
        open_run,
    )
    from perdure.inspect.averaging import Averaged, average
    from perdure.inspect.checkpoint_diff import diff
    from perdure.inspect.diff_result import CheckpointDiff, FieldDiff
    from perdure.inspect.exporting import Exported, export
    from perdure.inspect.importing import import_run
    from perdure.inspect.leaf_diff import LeafDiff
    from perdure.inspect.leaf_names import NameMap
    from perdure.inspect.leaf_reader import (
        Elements,
        read_array,
        read_elements,
        scalar_value,
        select_leaves,
    )
    from perdure.inspect.leaf_stats import Stats, StatsTable, stats
    from perdure.inspect.leaf_tree import LeafTree, LeafTreeNode, tree
    from perdure.inspect.listing import ListedCheckpoint, RunListing, list_run
    from perdure.inspect.origins import origin
    from perdure.inspect.renames import Rename
    from perdure.inspect.run_plot import plot
    from perdure.inspect.run_report import RunReport, report

# Imported at first use, because most commands need few of them.
_HOMES = {
    "Averaged": "averaging",
    "CheckpointDiff": "diff_result",
    "Elements": "leaf_reader",
    "Exported": "exporting",
    "FieldDiff": "diff_result",
    "LeafDiff": "leaf_diff",
    "LeafTree": "leaf_tree",
    "ListedCheckpoint": "listing",
    "NameMap": "leaf_names",
    "Rename": "renames",
    "RunListing": "listing",
    "RunReport": "run_report",
    "Stats": "leaf_stats",
    "StatsTable": "leaf_stats",
    "StoredCheckpoint": "perdure.checkpoint.address",
    "LeafTreeNode": "leaf_tree",
    "average": "averaging",
    "diff": "checkpoint_diff",
    "export": "exporting",
    "import_run": "importing",
    "list_run": "listing",
    "open_checkpoint": "perdure.checkpoint.address",
    "open_checkpoints": "perdure.checkpoint.address",
    "open_run": "perdure.checkpoint.address",
    "origin": "origins",
    "plot": "run_plot",
    "read_array": "leaf_reader",
    "read_elements": "leaf_reader",
    "report": "run_report",
    "scalar_value": "leaf_reader",
    "select_leaves": "leaf_reader",
    "stats": "leaf_stats",
    "tree": "leaf_tree",
}

__all__ = [
    "Averaged",
    "CheckpointDiff",
    "Elements",
    "Exported",
    "FieldDiff",
    "LeafDiff",
    "LeafTree",
    "LeafTreeNode",
    "ListedCheckpoint",
    "NameMap",
    "Rename",
    "RunListing",
    "RunReport",
    "Stats",
    "StatsTable",
    "StoredCheckpoint",
    "average",
    "diff",
    "export",
    "import_run",
    "list_run",
    "open_checkpoint",
    "open_checkpoints",
    "open_run",
    "origin",
    "plot",
    "read_array",
    "read_elements",
    "report",
    "scalar_value",
    "select_leaves",
    "stats",
    "tree",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = _HOMES[name]
        return getattr(import_module(home if "." in home else f"perdure.inspect.{home}"), name)
    raise AttributeError(f"module 'perdure.inspect' has no attribute {name!r}")
