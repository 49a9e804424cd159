"""When to save, what to keep, saving in the background, restoring."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpoint.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
    from perdure.checkpoint.manager import CheckpointManager
    from perdure.checkpoint.manager_options import ManagerOptions, Restored
    from perdure.checkpoint.preemption import EXIT_PREEMPTED, TerminationConfig
    from perdure.checkpoint.preemption_handler import PreemptionCheckpointHandler
    from perdure.checkpoint.retention import Retention
    from perdure.runtime.process_group import Processes, SingleProcess
    from perdure.state.per_rank import PerRank
    from perdure.state.restore_request import RestoreReport

# Imported at first use, so that `perdure ls`, which reads the rules of retention, needs no numpy.
_HOMES = {
    "EXIT_PREEMPTED": "perdure.checkpoint.preemption",
    "Checkpoint": "perdure.checkpoint.checkpoint",
    "CheckpointManager": "perdure.checkpoint.manager",
    "ManagerOptions": "perdure.checkpoint.manager_options",
    "PerRank": "perdure.state.per_rank",
    "PreemptionCheckpointHandler": "perdure.checkpoint.preemption_handler",
    "Processes": "perdure.runtime.process_group",
    "RestoreReport": "perdure.state.restore_request",
    "Restored": "perdure.checkpoint.manager_options",
    "Retention": "perdure.checkpoint.retention",
    "SingleProcess": "perdure.runtime.process_group",
    "TerminationConfig": "perdure.checkpoint.preemption",
    "latest_checkpoint": "perdure.checkpoint.checkpoint",
    "load_checkpoint": "perdure.checkpoint.checkpoint",
}

__all__ = ["PerRank", "SingleProcess"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perdure.checkpoint' has no attribute {name!r}")
