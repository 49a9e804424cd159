"""The arguments of `tf.train.CheckpointManager`, in its order, for `CheckpointManager`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from perdure.checkpoint.checkpoint import Checkpoint
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.checkpoint.retention import Retention
from perdure.tensorflow_names import refuse_arguments

Init = TypeVar("Init", bound=Callable[..., None])

_ORDER = ("checkpoint", "directory", "max_to_keep", "keep_checkpoint_every_n_hours")


def takes_tensorflow_order(init: Init) -> Init:
    """An `__init__` that also takes (checkpoint, directory, ...), and TensorFlow's keywords."""

    @wraps(init)
    def init_in_either_order(self: Any, *given: Any, **named: Any) -> None:
        if (given and isinstance(given[0], Checkpoint)) or "checkpoint" in named:
            given, named = given[len(_ORDER) :], {**dict(zip(_ORDER, given, strict=False)), **named}
        refuse_arguments("CheckpointManager", named.keys() - {"checkpoint"})
        if (interval := named.pop("checkpoint_interval", None)) is not None:
            named["save_interval_steps"] = interval
        if (hours := named.pop("keep_checkpoint_every_n_hours", None)) is not None:
            options = named.get("options") or ManagerOptions()
            rules = replace(options.retention or Retention(), keep_every_n_hours=hours)
            named["options"] = replace(options, retention=rules)
        init(self, *given, **named)

    return init_in_either_order  # type: ignore[return-value]
