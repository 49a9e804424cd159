"""Experiment trackers, whose curves continue after a resume: Weights & Biases and MLflow.

A resumed run computes the steps after its checkpoint again, with the same bits. So its curve has no
fork and no double point if it continues the same run of the tracker, and sends no point that this has.
That run is found by the id of the run directory.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from perdure.checkpoint import CheckpointManager
from perdure.errors import needs_extra, warn_caller
from perdure.runtime.process_group import framework_group
from perdure.store import Run, Storage
from perdure.train.trainer import Hook, Trainer

_TAG = "perdure.run"


def tracking_id(directory: str | os.PathLike[str] | Storage) -> str:
    """The name of the curve of a run directory, for a tracker that is set up elsewhere: 16
    hexadecimal digits. A rollback, undone or not, begins another curve, `ID-N`, because the steps after
    it may have other values; a fork has an id of its own.

    Raises `NotARunError` if there is no run directory, and `CorruptionError` for a damaged one.
    """
    run = Run(directory)
    aside = run.log.view.aside.values()
    number = max((why.line for why in aside if why.rolled_back_to is not None), default=0)
    return f"{run.log.run}-{number}" if number else f"{run.log.run}"


class Tracker:
    """Sends metrics by step to a run of an experiment tracker, once each. Call it in the loop:
    `tracker(step, {"loss": loss})`, and `close()` at the end, or use it in a `with`.

    In a group process 0 sends, and the others do nothing: the group of the manager, or, for a
    directory, that of the framework.
    """

    run: Any = None
    """The run of the tracker itself, for pictures, tables and files; None if another process sends."""

    def __init__(self, manager: CheckpointManager | str, **options: Any) -> None:
        if isinstance(manager, CheckpointManager):
            directory, is_chief = manager.directory, manager.is_chief
        else:
            group = framework_group()
            directory, is_chief = manager, group is None or group.index == 0
        if is_chief:
            self.run = self._begin(directory, **options)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values that the tracker does not have of `step`."""
        if self.run is not None:
            self._send(step, values)

    def close(self, *, has_failed: bool = False) -> None:
        """End the run of the tracker for now; a resumed process continues it."""
        if self.run is not None:
            self._end(has_failed)

    def _begin(self, directory: Any, **options: Any) -> Any:
        """The new or the continued run."""
        raise NotImplementedError

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _end(self, has_failed: bool) -> None:
        raise NotImplementedError

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(has_failed=kind is not None)


class WandbTracker(Tracker):
    """Weights & Biases. Steps that the run has are not sent again.

    Args:
        manager: The manager of the run, or its directory.
        options: As for `wandb.init`, without `id` and `resume`.

    Raises `MissingExtraError` without wandb.
    """

    def _begin(self, directory: Any, **options: Any) -> Any:
        with needs_extra("wandb"):
            import wandb
        run = wandb.init(id=tracking_id(directory), resume="allow", **options)
        self._first = int(run.step)
        return run

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._first:
            self.run.log(dict(values), step=step)

    def _end(self, has_failed: bool) -> None:
        self.run.finish(exit_code=int(has_failed))


class MlflowTracker(Tracker):
    """MLflow. Points that the run has are compared with those of the resumed run, and not sent again: a
    warning names the first one with another value.

    Args:
        manager: The manager of the run, or its directory.
        experiment: Name of the experiment; created if it is missing.
        run_name: Name of a new run.
        tracking_uri: As for `mlflow.MlflowClient`.

    Raises `MissingExtraError` without mlflow.
    """

    def __init__(
        self,
        manager: CheckpointManager | str,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self._has_warned = False
        super().__init__(
            manager, experiment=experiment, run_name=run_name, tracking_uri=tracking_uri
        )

    def _begin(self, directory: Any, **options: Any) -> Any:
        with needs_extra("mlflow"):
            from mlflow import MlflowClient
        self._client, experiment = MlflowClient(options["tracking_uri"]), options["experiment"]
        found = self._client.get_experiment_by_name(experiment)
        number = (
            self._client.create_experiment(experiment) if found is None else found.experiment_id
        )
        name = tracking_id(directory)
        runs = self._client.search_runs([number], f"tags.`{_TAG}` = '{name}'", max_results=1)
        if runs:
            self._client.update_run(runs[0].info.run_id, "RUNNING")
            return runs[0]
        tags = {_TAG: name, "perdure.directory": str(directory)}
        return self._client.create_run(number, tags=tags, run_name=options["run_name"])

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        run, now, new = self.run.info.run_id, int(time.time() * 1000), list[Any]()
        try:
            for key, value in values.items():
                if key not in self._points:
                    history = self._client.get_metric_history(run, key)
                    self._points[key] = {point.step: point.value for point in history}
                if step not in self._points[key]:
                    new.append(Metric(key, float(value), now, step))
                else:
                    self._compare(step, key, self._points[key][step], float(value))
            if new:
                self._client.log_batch(run, metrics=new)
        except MlflowException as error:
            # Training continues, and a resumed run sends what is missing.
            self._warn(f"step {step}: MLflow did not take the metrics: {error}")
            return
        for metric in new:
            self._points[metric.key][step] = metric.value

    def _compare(self, step: int, key: str, stored: float, value: float) -> None:
        if math.isfinite(value) and value != stored:  # a database has other infinities
            self._warn(
                f"step {step}: MLflow has {key} = {stored}, and this run, which computes the step "
                f"again, {value}: it is not the same training. MLflow keeps its own."
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_caller(text)

    def _end(self, has_failed: bool) -> None:
        self._client.set_terminated(self.run.info.run_id, "FAILED" if has_failed else "FINISHED")


class _TrackerHook(Hook):
    kind: type[Tracker]

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.tracker: Tracker | None = None

    def begin(self, trainer: Trainer) -> None:
        assert trainer.manager is not None
        self.tracker = self.kind(trainer.manager, **self._options)
        trainer.summaries.trackers.append(self.tracker)

    def end(self, trainer: Trainer) -> None:
        if self.tracker is not None:
            trainer.summaries.trackers.remove(self.tracker)
            self.tracker.close(has_failed=sys.exc_info()[0] is not None)
            self.tracker = None


class WandbHook(_TrackerHook):
    """Sends the summaries of a `Trainer` to Weights & Biases, from process 0; options as for
    `WandbTracker`."""

    kind = WandbTracker


class MlflowHook(_TrackerHook):
    """Sends the summaries of a `Trainer` to MLflow, from process 0; options as for `MlflowTracker`."""

    kind = MlflowTracker
