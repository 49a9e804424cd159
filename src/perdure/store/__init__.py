"""Storing checkpoints: run directories on disks and in buckets. Knows no framework for training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.store.garbage_collection import Collected, CollectPlan, PruneRequest
from perdure.store.leaf import Leaf
from perdure.store.loading import Loaded
from perdure.store.local import LocalStorage
from perdure.store.manifest import Manifest
from perdure.store.repair import Repaired, repair
from perdure.store.run import Run
from perdure.store.storage import MemoryStorage, Sink, Storage
from perdure.store.verify import Problem, VerifyReport, verify_run

if TYPE_CHECKING:
    from perdure.store.bucket import CloudOptions
    from perdure.store.cloud import CloudStorage
    from perdure.store.copy import Copied, copy_run, fork_run

# Imported at first use, because listing a directory needs none of them.
_HOMES = {
    "CloudOptions": "perdure.store.bucket",
    "CloudStorage": "perdure.store.cloud",
    "Copied": "perdure.store.copy",
    "copy_run": "perdure.store.copy",
    "fork_run": "perdure.store.copy",
}

__all__ = [
    "CloudOptions",
    "CloudStorage",
    "Run",
    "Storage",
    "copy_run",
    "fork_run",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perdure.store' has no attribute {name!r}")
