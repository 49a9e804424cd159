"""Training that comes out the same, whatever happens to it.

An interrupted run ends bit-identical to one that was never interrupted, and a run on many workers
ends bit-identical to a run on one.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpoint import (
        EXIT_PREEMPTED,
        Checkpoint,
        CheckpointManager,
        ManagerOptions,
        PreemptionCheckpointHandler,
        Retention,
        TerminationConfig,
        latest_checkpoint,
        load_checkpoint,
    )
    from perdure.data import ArrayDataset
    from perdure.distribute import initialize_distributed
    from perdure.errors import PerdureError
    from perdure.runtime.heartbeats import heartbeat
    from perdure.store import LocalStorage, MemoryStorage, verify_run
    from perdure.train import RunConfig, Trainer

__version__ = "0.1.0"

# Resolved on first use, so that `import perdure` and `perdure ls` stay quick and framework-free. Names
# without an entry are in `perdure.checkpoint`.
_HOMES = {
    "ArrayDataset": "perdure.data",
    "LocalStorage": "perdure.store",
    "MemoryStorage": "perdure.store",
    "PerdureError": "perdure.errors",
    "RunConfig": "perdure.train",
    "Trainer": "perdure.train",
    "heartbeat": "perdure.runtime.heartbeats",
    "initialize_distributed": "perdure.distribute",
    "verify_run": "perdure.store",
}

_MODULES = ("checkpoint", "data", "distribute", "errors", "jax", "keras", "torch", "train")

__all__ = [
    "EXIT_PREEMPTED",
    "ArrayDataset",
    "Checkpoint",
    "CheckpointManager",
    "LocalStorage",
    "ManagerOptions",
    "MemoryStorage",
    "PerdureError",
    "PreemptionCheckpointHandler",
    "Retention",
    "RunConfig",
    "TerminationConfig",
    "Trainer",
    "__version__",
    "heartbeat",
    "initialize_distributed",
    "latest_checkpoint",
    "load_checkpoint",
    "verify_run",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "perdure.checkpoint")), name)
    if name in _MODULES:  # as `tf.keras`, without an import of its own
        return import_module(f"perdure.{name}")
    from perdure.tensorflow_names import missing  # takes long, and few programs need it

    raise missing("perdure", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "PERDURE_HEARTBEAT_FILE" in os.environ:  # under `perdure run` this import is the first heartbeat
    import_module("perdure.runtime.heartbeats")
