"""`RunConfig`: everything about a run that is not the training itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure.checkpoint import ManagerOptions, TerminationConfig
from perdure.errors import TrainError
from perdure.store import Storage
from perdure.train.interval import AutoInterval

DEFAULT_SAVE_SECS = 600.0


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, when it saves, what it writes down; the names are those of TensorFlow's
    estimators.

    Saving: `save_checkpoints_steps`, or `save_checkpoints_secs` (seconds; "auto" or an `AutoInterval`
    finds the interval that pays), and every 600 seconds when neither is given; always before the
    first step, with an evaluation, and at the end. `keep_checkpoint_max` newest ones stay (None: all),
    and one for every `keep_checkpoint_every_n_hours`; `checkpoint` has the rest of it (best by a
    metric, what a failed save means), and `mirror` is a second run directory that receives a copy of
    every checkpoint in the background (see `CheckpointManager`).

    Writing down: metrics every `save_summary_steps` steps into TensorBoard events and
    `metrics.jsonl`, in the run directory or in `summary_dir`; a line or the progress bar every
    `log_step_count_steps` steps, by default every half second on a terminal and every ten seconds
    off it. `progress` chooses ("auto": a bar on a terminal, lines elsewhere), and `console` is where
    it goes: a text stream or a `rich` console, by default standard error.

    `steps_per_execution` steps run in one call, with saves, hooks and preemption behind it.
    `nan_metrics` is what a save means while a metric is NaN: "save" (with a warning), "skip", or
    "raise". `seed` is recorded in the recipe and given to a `state` that is a function of one
    argument. `allow` names fields of the recipe that may differ. `clock` counts seconds.
    """

    model_dir: str | os.PathLike[str] | Storage
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | Literal["auto"] | AutoInterval | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = None
    save_summary_steps: int = 100
    log_step_count_steps: int | None = None
    seed: int | None = None
    steps_per_execution: int = 1
    nan_metrics: Literal["save", "skip", "raise"] = "save"
    allow: tuple[str, ...] = ()
    mirror: str | os.PathLike[str] | Storage | None = None
    checkpoint: ManagerOptions = field(default_factory=ManagerOptions)
    termination: TerminationConfig = field(default_factory=TerminationConfig)
    summary_dir: str | os.PathLike[str] | None = None
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    console: Any = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is not None and secs is not None:
            raise TrainError(
                f"expected one of save_checkpoints_steps and save_checkpoints_secs, found both "
                f"({steps} and {secs!r}); leave one out."
            )
        for name, least in (
            ("save_checkpoints_steps", 1),
            ("keep_checkpoint_max", 1),
            ("save_summary_steps", 1),
            ("log_step_count_steps", 1),
            ("steps_per_execution", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            optional = name not in ("save_summary_steps", "steps_per_execution")
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TrainError(
                    f"{name}: expected {'None or ' if optional else ''}an integer of at least "
                    f"{least}, found {value!r}."
                )
        if isinstance(secs, str):
            if secs != "auto":
                raise TrainError(
                    f"save_checkpoints_secs: expected seconds, 'auto' or an AutoInterval, found "
                    f"{secs!r}."
                )
        elif secs is not None and not isinstance(secs, AutoInterval) and not _is_positive(secs):
            raise TrainError(f"save_checkpoints_secs: expected more than 0, found {secs!r}.")
        hours = self.keep_checkpoint_every_n_hours
        if hours is not None and not _is_positive(hours):
            raise TrainError(
                f"keep_checkpoint_every_n_hours: expected None or more than 0, found {hours!r}."
            )
        for name, kinds, wanted in (
            ("allow", (tuple, list), "a tuple of names"),
            ("checkpoint", (ManagerOptions,), "a ManagerOptions"),
            ("termination", (TerminationConfig,), "a TerminationConfig"),
        ):
            if not isinstance(value := getattr(self, name), kinds):
                raise TrainError(f"{name}: expected {wanted}, found {value!r}.")
        for name, choices in (
            ("nan_metrics", ("save", "skip", "raise")),
            ("progress", ("auto", "bar", "lines", "off")),
        ):
            if getattr(self, name) not in choices:
                raise TrainError(
                    f"{name}: expected one of {', '.join(map(repr, choices))}, found "
                    f"{getattr(self, name)!r}."
                )

    @property
    def save_every(self) -> float | AutoInterval | None:
        """Seconds between saves; None where steps decide."""
        if self.save_checkpoints_steps is not None:
            return None
        secs = self.save_checkpoints_secs
        if secs is None:
            return DEFAULT_SAVE_SECS
        return AutoInterval() if isinstance(secs, str) else secs


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
