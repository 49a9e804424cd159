"""The ready-made training loop: `Trainer`, `RunConfig` and hooks."""

from typing import Any

from perdure.tensorflow_names import missing
from perdure.train.config import CheckpointConfig, OutputConfig, RunConfig
from perdure.train.hooks import EarlyStopping, ReduceLROnPlateau
from perdure.train.interval import AutoInterval
from perdure.train.trainer import Hook, Trainer

__all__ = [
    "AutoInterval",
    "CheckpointConfig",
    "EarlyStopping",
    "Hook",
    "OutputConfig",
    "ReduceLROnPlateau",
]


def __getattr__(name: str) -> Any:
    raise missing("perdure.train", name)
