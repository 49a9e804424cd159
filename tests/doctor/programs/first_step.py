"""Trains with a strategy on NumPy; each argument names what is wrong on device 1."""

import sys
from pathlib import Path

import numpy as np
from numpy_engine import NumpyEngine

from perdure.checkpoint import CheckpointManager
from perdure.data import ArrayDataset
from perdure.distribute import Strategy

wrong = set(sys.argv[1:])


class Engine(NumpyEngine):
    """A NumPy engine whose device 1 computes wrong numbers."""

    def put(self, value, device):
        self.device = device
        return value

    def grad(self, fn, state, share, stream):
        value = super().grad(fn, state, share, stream)
        if f"replica {stream.replica}" in wrong and self.device == 1:
            value["g"] = np.nextafter(value["g"], np.float32(9))
        return value

    def update(self, fn, state, total, stream):
        state, logs = super().update(fn, state, total, stream)
        if "update" in wrong and self.device == 1:
            state = {"w": -state["w"], "b": state["b"]}
        return state, logs


def grad(state, batch, key):
    noise = np.random.default_rng().normal() if "batch" in wrong else 0
    g = (batch["x"] * batch["weight"]).sum() * state["w"] + np.float32(noise)
    return {"g": g, "n": batch["weight"].sum()}


def update(state, total):
    return {"w": state["w"] - total["g"] / total["n"], "b": state["b"]}, {}


rng = np.random.default_rng(None if "data" in wrong else 1)
dataset = ArrayDataset({"x": rng.normal(size=24).astype(np.float32)}, batch_size=12, seed=1)
strategy = Strategy(Engine(3), 4)
Path("begun").touch()
with CheckpointManager("runs/mine", recipe=strategy.recipe(dataset)) as manager:
    train_step = strategy.step(grad, update)
    fresh = {"w": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}
    state, start = manager.restore_or_initialize(fresh)
    for step in range(start, 9):
        state, _ = train_step(state, strategy.batch(dataset, step))
        raise AssertionError("the doctor ends the program in its first step")
