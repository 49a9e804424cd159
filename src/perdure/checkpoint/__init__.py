"""When to save, what to keep, saving in the background, restoring."""

from perdure.checkpoint.checkpoint import Checkpoint, load_checkpoint
from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.manager_options import ManagerOptions, Restored
from perdure.checkpoint.preemption import EXIT_PREEMPTED, TerminationConfig
from perdure.checkpoint.preemption_handler import PreemptionCheckpointHandler
from perdure.checkpoint.retention import Retention
from perdure.process_group import Processes, SingleProcess
from perdure.state.per_rank import PerRank
from perdure.state.restore_report import RestoreReport

__all__ = [
    "EXIT_PREEMPTED",
    "Checkpoint",
    "CheckpointManager",
    "ManagerOptions",
    "PerRank",
    "PreemptionCheckpointHandler",
    "Processes",
    "RestoreReport",
    "Restored",
    "Retention",
    "SingleProcess",
    "TerminationConfig",
    "load_checkpoint",
]
