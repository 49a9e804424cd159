"""The ready-made loop: `Trainer`, `RunConfig`, hooks, progress, summaries."""

from perdure.train.config import RunConfig
from perdure.train.hooks import EarlyStopping, Hook, ReduceLROnPlateau
from perdure.train.interval import AutoInterval, optimum_interval
from perdure.train.profiler import Profiler
from perdure.train.trainer import Trainer

__all__ = [
    "AutoInterval",
    "EarlyStopping",
    "Hook",
    "Profiler",
    "ReduceLROnPlateau",
    "RunConfig",
    "Trainer",
    "optimum_interval",
]
