"""Curves of experiment trackers after a crash: each point once, and a new curve after a rollback.

MLflow and Weights & Biases are stand-ins here, with what their documents say of `search_runs`, `resume`
and `step`; where MLflow is installed (`make proof-doors`), it is MLflow.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.runtime.process_group import FrameworkGroup
from perdure.store import Run
from perdure.train import Hook, RunConfig
from perdure.train.trackers import MlflowHook, MlflowTracker, WandbHook, WandbTracker, tracking_id
from pretend import Pretend, play


class StandInMlflow:
    """The client of a server that keeps every point that it is sent."""

    runs: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, uri: Any) -> None:
        pass

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="0")

    def search_runs(self, experiments: Any, filter_string: str, max_results: int) -> list[Any]:
        tag = filter_string.split("'")[1]
        return [run for run in self.runs.values() if run.data.tags["perdure.run"] == tag]

    def create_run(self, experiment: str, *, tags: Any, run_name: Any) -> Any:
        info = SimpleNamespace(run_id=str(len(self.runs)), status="RUNNING")
        run = SimpleNamespace(info=info, data=SimpleNamespace(tags=tags), points=[])
        self.runs[info.run_id] = run
        return run

    def get_metric_history(self, run: str, key: str) -> list[Any]:
        return [point for point in self.runs[run].points if point.key == key]

    def log_batch(self, run: str, *, metrics: Any) -> None:
        self.runs[run].points += metrics

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].info.status = status

    update_run = set_terminated


class StandInMetric:
    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
        self.key, self.value, self.step = key, value, step


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("mlflow") is not None:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        return MlflowClient(f"file://{tmp_path}/mlflow")
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    exceptions = ModuleType("mlflow.exceptions")
    monkeypatch.setattr(StandInMlflow, "runs", {})
    module.MlflowClient = StandInMlflow  # type: ignore[attr-defined]
    entities.Metric = StandInMetric  # type: ignore[attr-defined]
    exceptions.MlflowException = OSError  # type: ignore[attr-defined]
    for each in (module, entities, exceptions):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return StandInMlflow(None)


class Wandb(ModuleType):
    """Keeps what each run was sent; a step below that of the run is an error."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows: dict[str, list[tuple[int, float]]] = {}

    def init(self, id: str, resume: str, **options: Any) -> Any:
        assert resume == "allow"
        rows = self.rows.setdefault(id, [])

        def log(values: Any, step: int) -> None:
            assert not rows or step > rows[-1][0], "each step is sent once"
            rows.append((step, values["loss"]))

        return SimpleNamespace(
            step=rows[-1][0] + 1 if rows else 0, log=log, finish=lambda **_: None
        )


class Killed(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Any, logs: Any) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


def train(where: Path, hooks: list[Hook], killed_at: int = 0, scale: float = 1.0) -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch * scale}, {"loss": float(state["w"].sum())}

    config = RunConfig(where, save_checkpoints_steps=4, save_summary_steps=1)
    trainer = perdure.Trainer(
        step, {"w": np.zeros(2)}, lambda i: np.full(2, float(i)), config, hooks=hooks
    )
    if killed_at:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(10, hooks=[Killed(killed_at)])
    else:
        trainer.train(10)


def curves(client: Any, tag: str) -> list[Any]:
    (run,) = client.search_runs(["0"], f"tags.`perdure.run` = '{tag}'", max_results=2)
    history = client.get_metric_history(run.info.run_id, "loss")
    return [run.info.status, [(point.step, point.value) for point in history]]


def test_a_curve_of_mlflow_has_each_point_once_and_a_rollback_begins_another(
    tmp_path: Path, client: Any
) -> None:
    hooks: list[Hook] = [MlflowHook(tracking_uri=f"file://{tmp_path}/mlflow")]
    train(tmp_path / "run", hooks, killed_at=6)
    name = tracking_id(tmp_path / "run")
    status, points = curves(client, name)
    assert (status, [step for step, _ in points]) == ("FAILED", [1, 2, 3, 4, 5])
    train(tmp_path / "run", hooks)
    status, points = curves(client, name)
    assert (status, [step for step, _ in points]) == ("FINISHED", list(range(1, 11)))
    Run(tmp_path / "run").rollback(4)
    other = tracking_id(tmp_path / "run")
    assert other.startswith(f"{name}-")
    train(tmp_path / "run", hooks, scale=2.0)
    assert curves(client, name)[1] == points
    assert [step for step, _ in curves(client, other)[1]] == list(range(5, 11))


def test_a_loop_that_is_not_the_same_is_named(tmp_path: Path, client: Any) -> None:
    def loop(last: int, fault: float) -> None:
        with perdure.CheckpointManager(tmp_path / "run", save_interval_steps=3) as manager:
            state, start = manager.restore_or_initialize({"x": np.zeros(1)})
            where = f"file://{tmp_path}/mlflow"
            with MlflowTracker(manager, tracking_uri=where) as tracker:
                for step in range(start, last):
                    state["x"] += 1 + fault * (step == 4)
                    tracker(step + 1, {"loss": float(state["x"][0]), "other": float("nan")})
                    manager.save(step + 1, state)

    loop(5, 0.0)
    with pytest.warns(UserWarning, match=r"step 5: MLflow has loss = 5\.0, and this run"):
        loop(8, 1.0)
    points = curves(client, tracking_id(tmp_path / "run"))[1]
    assert points == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
        (5, 5.0),
        (6, 7.0),
        (7, 8.0),
        (8, 9.0),
    ]


@pytest.mark.parametrize("of_directory", [False, True])
@pytest.mark.parametrize("kind", [MlflowTracker, WandbTracker])
def test_process_0_of_a_group_sends(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, of_directory: bool
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := Wandb())
    rank = threading.local()
    group = lambda: FrameworkGroup("torch", rank.index, 3, None)  # noqa: E731
    monkeypatch.setattr("perdure.train.trackers.framework_group", group)
    where = {"tracking_uri": f"file://{tmp_path}/mlflow"} if kind is MlflowTracker else {}

    def program(process: Pretend) -> bool:
        rank.index = process.index
        with perdure.CheckpointManager(tmp_path / "run", processes=process) as manager:
            manager.restore_or_initialize({"x": np.zeros(1)})
            with kind(str(tmp_path / "run") if of_directory else manager, **where) as tracker:
                for step in (1, 2):
                    tracker(step, {"loss": float(process.index)})
                return tracker.run is not None

    assert play(3, program) == [True, False, False]
    name = tracking_id(tmp_path / "run")
    points = curves(client, name)[1] if kind is MlflowTracker else wandb.rows[name]
    assert points == [(1, 0.0), (2, 0.0)]


def test_a_curve_of_wandb_has_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := Wandb())
    train(tmp_path / "run", [WandbHook(project="p")], killed_at=6)
    train(tmp_path / "run", [WandbHook(project="p")])
    train(tmp_path / "whole", [WandbHook(project="p")])
    cut, whole = wandb.rows.values()
    assert cut == whole
    assert len(whole) == 10


def test_a_tracker_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"perdure\[wandb\]"):
        train(tmp_path / "run", [WandbHook(project="p")])
