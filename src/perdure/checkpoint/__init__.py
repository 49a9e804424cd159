"""When to save, what to keep, saving in the background, restoring."""

from perdure.checkpoint.checkpoint import Checkpoint, load
from perdure.checkpoint.manager import CheckpointManager, Restored
from perdure.checkpoint.preemption import EXIT_PREEMPTED
from perdure.checkpoint.processes import Processes, SingleProcess

__all__ = [
    "EXIT_PREEMPTED",
    "Checkpoint",
    "CheckpointManager",
    "Processes",
    "Restored",
    "SingleProcess",
    "load",
]
