"""A small training problem in NumPy, and the results of a run that tests compare."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perdure import ArrayDataset, RunConfig, Trainer
from perdure.store import Run
from perdure.store.format import Metric
from perdure.train import Hook, OutputConfig
from perdure.train.summaries import METRICS, read

STEPS = 12


def data(examples: int = 40) -> ArrayDataset:
    x = np.random.default_rng(0).normal(size=(examples, 3)).astype(np.float32)
    return ArrayDataset({"x": x}, batch_size=8, seed=1)


def fresh() -> dict[str, Any]:
    return {"w": np.ones(3, np.float32), "rate": 0.5, "n": 0}


def step_fn(state: Any, batch: Any) -> tuple[Any, Any]:
    """A step towards the mean of the batch; every bit of the state depends on the order of batches."""
    error = state["w"] - (batch["x"] * batch["weight"][:, None]).sum(0) / batch["weight"].sum()
    w = (state["w"] - state["rate"] * error).astype(np.float32)
    return {**state, "w": w, "n": state["n"] + 1}, {"loss": float((error**2).sum())}


def eval_fn(state: Any, batch: Any) -> Any:
    weight = float(batch["weight"].sum())
    return {"distance": (float(np.abs(state["w"]).sum()) * weight, weight)}


def config(where: Any, **options: Any) -> RunConfig:
    """A quiet `RunConfig`; options of `OutputConfig` and `CheckpointConfig` may be given flat."""
    output = {name: options.pop(name) for name in ("progress", "summary_dir") if name in options}
    given = {
        "save_checkpoints_steps": 4,
        "save_summary_steps": 2,
        "output": OutputConfig(console=io.StringIO(), **output),
    }
    return RunConfig(where, **{**given, **options})


def trainer(where: Any, hooks: Any = (), **options: Any) -> Trainer:
    source = options.pop("data", None) or data()
    return Trainer(step_fn, fresh(), source, config(where, **options), hooks, eval_fn=eval_fn)


def console_text(of: Trainer) -> str:
    return of.config.output.console.getvalue()


def prints(where: Path) -> dict[int, str]:
    """The fingerprint of every checkpoint, by step."""
    run = Run(where)
    return {step: run.manifest(step).fingerprint for step in run.steps()}


def rows(where: Path) -> list[tuple[int, Mapping[str, Metric]]]:
    """The rows of `metrics.jsonl` without the times."""
    return [(row.step, row.metrics) for row in read(where / METRICS)]


class Spy(Hook):
    """Records its calls, and raises after one step if asked to."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.calls: list[Any] = []
        self.ran: list[int] = []
        self.fail_after = fail_after

    def begin(self, trainer: Trainer) -> None:
        self.calls.append(("begin", trainer.step))

    def before_step(self, trainer: Trainer) -> None:
        self.ran.append(trainer.step)

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        if trainer.step == self.fail_after:
            raise RuntimeError(f"planned at step {trainer.step}")

    def after_evaluate(self, trainer: Trainer, metrics: Any) -> None:
        self.calls.append(("evaluate", trainer.step, dict(metrics)))

    def end(self, trainer: Trainer) -> None:
        self.calls.append(("end", trainer.step))
