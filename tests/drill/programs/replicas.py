"""Trains a number with a strategy that needs no framework; arguments change a contribution."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "distribute"))
from numpy_engine import NumpyEngine

from perdure import CheckpointManager, ManagerOptions
from perdure.data import ArrayDataset
from perdure.distribute import Strategy

arguments = dict(argument.split("=") for argument in sys.argv[1:])
devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", 1))
data = ArrayDataset({"x": np.arange(48, dtype=np.float32)}, batch_size=12, seed=1)
strategy = Strategy(NumpyEngine(devices), 6)


def grad(state: Any, batch: Any, key: Any) -> Any:
    slope = (batch["x"] * batch["weight"]).sum() * state["w"]
    if "replica" in arguments and float(state["n"]) == 6 and 14 in batch["x"]:  # replica 3
        slope = slope * np.float32(1.01)
    if "by" in arguments and float(state["n"]) == 6:
        slope = slope * np.float32(devices)
    return {"g": slope, "n": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    w = state["w"] - np.float32(0.001) * total["g"] / total["n"]
    return {"w": w, "n": state["n"] + np.float32(1)}, {}


with CheckpointManager(
    os.path.join("runs", arguments.get("run", "mine")),
    max_to_keep=None,
    save_interval_steps=4,
    options=ManagerOptions(journal_every=1),
    recipe=strategy.recipe(data),
) as manager:
    step_fn = strategy.step(grad, update, journal=manager.journal)
    state, start = manager.restore_or_initialize(
        {"w": np.ones(3, np.float32), "n": np.zeros((), np.float32)}
    )
    for step in range(start, 9):
        # The strategy may count from another step than the checkpoints.
        state, _ = step_fn(state, strategy.batch(data, step + 2))
        manager.save(step + 1, state)
