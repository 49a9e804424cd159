"""`RunConfig`: everything about a run that is not the training itself, in TensorFlow's names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from perdure.checkpoint import ManagerOptions, TerminationConfig
from perdure.checkpoint.arguments import integer, require_choice, require_number
from perdure.distribute import Cluster, resolve
from perdure.errors import ArgumentError
from perdure.store import Storage
from perdure.tensorflow_names import TensorFlowNames, refuse_arguments
from perdure.train.interval import AutoInterval

DEFAULT_SAVE_SECS = 600.0


@dataclass(frozen=True)
class CheckpointConfig(ManagerOptions):
    """The checkpoints of a `Trainer`: `ManagerOptions`, and what a manager takes as arguments.

    Args:
        mirror: A second run directory that receives a copy of every checkpoint in the background.
        allow: Fields of the recipe that may differ between the checkpoint and this run.
        termination: How the run learns that it is preempted, and how it exits.
        nan_metrics: What happens to a save while a metric is NaN: "save" (with a warning), "skip" or
            "raise".
    """

    mirror: str | os.PathLike[str] | Storage | None = None
    allow: tuple[str, ...] = ()
    termination: TerminationConfig = field(default_factory=TerminationConfig)
    nan_metrics: Literal["save", "skip", "raise"] = "save"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_type("allow", self.allow, (tuple, list), "a tuple of names")
        _require_type("termination", self.termination, TerminationConfig, "a TerminationConfig")
        require_choice("nan_metrics", self.nan_metrics, ("save", "skip", "raise"))


@dataclass(frozen=True)
class OutputConfig:
    """Where a `Trainer` writes for people.

    Args:
        summary_dir: Local directory of `metrics.jsonl` and the TensorBoard events; None is the run
            directory, if that is local.
        tensorboard: Whether to write events for TensorBoard; None writes them if it is installed.
        progress: "lines" or "off".
        console: A text stream for the lines. None is standard error; in a notebook the progress is then
            one output of the cell, which is updated.
    """

    summary_dir: str | os.PathLike[str] | None = None
    tensorboard: bool | None = None
    progress: Literal["lines", "off"] = "lines"
    console: Any = None

    def __post_init__(self) -> None:
        require_choice("progress", self.progress, ("lines", "off"))


@dataclass(frozen=True)
class RunConfig(TensorFlowNames):
    """Everything about a run that is not the training itself; the flat names are TensorFlow's.

    Args:
        model_dir: Run directory (a path, a URL or a `Storage`).
        save_checkpoints_steps: Save after every so many steps. Every run also saves before its first
            step, with each evaluation and at its end.
        save_checkpoints_secs: Save every so many seconds instead; "auto" or an `AutoInterval` finds the
            interval that loses the least time. 600 if neither is given.
        keep_checkpoint_max: How many of the newest checkpoints to keep; None, or 0 as in TensorFlow,
            keeps all (`max_to_keep` of `CheckpointManager`).
        keep_checkpoint_every_n_hours: Keep one checkpoint for every so many hours too
            (`Retention.keep_every_n_hours`).
        save_summary_steps: Write the metrics for people after every so many steps.
        log_step_count_steps: Show progress after every so many steps. None: every 10 s (notebook: 1 s).
        seed: Recorded in the recipe, and passed to a `state` that is a function of one argument.
        steps_per_execution: Steps that run in one call. Saves, hooks and preemption are then handled
            after every so many steps.
        journal_every: Record digests of the state and the batch in the journal after every so many
            steps, and compare the steps that a resumed run repeats (`ManagerOptions.journal_every`).
        audit: Share of the steps of a strategy, 0 to 1, in which the contribution of one replica is
            computed again and compared (`Strategy.step`). None for what the step itself says.
        checkpoint: The other options of the checkpoints.
        output: Where summaries and progress go.
        clock: Returns seconds; for tests.

    Raises:
        ArgumentError: A field has a value that cannot be used.
    """

    model_dir: str | os.PathLike[str] | Storage = None  # type: ignore[assignment]
    _: KW_ONLY  # TensorFlow has these in another order
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | Literal["auto"] | AutoInterval | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = None
    save_summary_steps: int = 100
    log_step_count_steps: int | None = None
    seed: int | None = None
    steps_per_execution: int = 1
    journal_every: int | None = None
    audit: float | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    clock: Callable[[], float] = time.monotonic

    def __new__(cls, *_arguments: Any, **named: Any) -> RunConfig:
        refuse_arguments("RunConfig", named, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.model_dir is None:
            raise ArgumentError('model_dir: expected a run directory, as RunConfig("runs/name").')
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is not None and secs is not None:
            raise ArgumentError(
                f"expected one of save_checkpoints_steps and save_checkpoints_secs, found both "
                f"({steps} and {secs!r}); leave one out."
            )
        for name, least in (
            ("save_checkpoints_steps", 1),
            ("keep_checkpoint_max", 0),
            ("log_step_count_steps", 1),
            ("journal_every", 1),
            ("seed", 0),
        ):
            integer(name, getattr(self, name), least, optional=True)
        integer("save_summary_steps", self.save_summary_steps)
        integer("steps_per_execution", self.steps_per_execution)
        if secs != "auto" and not isinstance(secs, AutoInterval):
            expected = "more than 0, 'auto' or an AutoInterval"
            require_number("save_checkpoints_secs", secs, lambda s: s > 0, expected)
        hours = self.keep_checkpoint_every_n_hours
        require_number("keep_checkpoint_every_n_hours", hours, lambda h: h > 0)
        require_number("audit", self.audit, lambda a: 0 <= a <= 1, "a share from 0 to 1")
        _require_type("checkpoint", self.checkpoint, CheckpointConfig, "a CheckpointConfig")
        _require_type("output", self.output, OutputConfig, "an OutputConfig")

    def replace(self, **changes: Any) -> RunConfig:
        """This configuration with other values for some fields.

        A new interval between saves, in steps or in seconds, takes the place of the other one.
        """
        intervals = ("save_checkpoints_steps", "save_checkpoints_secs")
        if any(changes.get(name) is not None for name in intervals):
            changes = dict.fromkeys(intervals) | changes
        return replace(self, **changes)

    @cached_property
    def _cluster(self) -> Cluster:
        return resolve()

    @property
    def is_chief(self) -> bool:
        """Whether this is process 0 of the group that the environment describes."""
        return self._cluster.is_chief

    @property
    def task_type(self) -> str:
        """ "chief" or "worker"; a process that is alone is a worker, as in TensorFlow."""
        return self._cluster.task_type or "worker"

    @property
    def task_id(self) -> int:
        """The number of this process among those of its `task_type`."""
        return self._cluster.task_id or 0

    @property
    def num_worker_replicas(self) -> int:
        """The number of processes, the chief included."""
        return self._cluster.num_processes

    @property
    def save_interval_secs(self) -> float | AutoInterval | None:
        """Seconds between saves; None if steps decide."""
        if self.save_checkpoints_steps is not None:
            return None
        secs = self.save_checkpoints_secs
        if secs is None:
            return DEFAULT_SAVE_SECS
        return AutoInterval() if isinstance(secs, str) else secs


def _require_type(name: str, value: Any, kinds: Any, expected: str) -> None:
    if not isinstance(value, kinds):
        raise ArgumentError(f"{name}: expected {expected}, found {value!r}.")
