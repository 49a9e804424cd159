"""Bytes on storage: chunks, packs, manifests, commit, verify, collect. Knows no ML framework."""

from perdure.store.bucket import CloudOptions
from perdure.store.cloud import CloudStorage
from perdure.store.collect import Collected, CollectPlan, Request
from perdure.store.format import Manifest
from perdure.store.leaf import Leaf
from perdure.store.local import LocalStorage
from perdure.store.memory import MemoryStorage
from perdure.store.repair import Repaired, repair
from perdure.store.run import Loaded, Run
from perdure.store.staged import StagedStorage
from perdure.store.storage import Sink, Storage
from perdure.store.verify import Problem, Report, check

__all__ = [
    "CloudOptions",
    "CloudStorage",
    "CollectPlan",
    "Collected",
    "Leaf",
    "Loaded",
    "LocalStorage",
    "Manifest",
    "MemoryStorage",
    "Problem",
    "Repaired",
    "Report",
    "Request",
    "Run",
    "Sink",
    "StagedStorage",
    "Storage",
    "check",
    "repair",
]
