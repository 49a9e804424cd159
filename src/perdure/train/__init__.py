"""The ready-made training loop: `Trainer`, `RunConfig` and hooks."""

from perdure.train.config import CheckpointConfig, OutputConfig, RunConfig
from perdure.train.hooks import EarlyStopping, ReduceLROnPlateau
from perdure.train.interval import AutoInterval
from perdure.train.profiler import Profiler
from perdure.train.trainer import Hook, Trainer

__all__ = [
    "AutoInterval",
    "CheckpointConfig",
    "EarlyStopping",
    "Hook",
    "OutputConfig",
    "Profiler",
    "ReduceLROnPlateau",
]
