"""A training in which one device computes wrong numbers from some step on, until it is left out.

Run by `audit_rows.py` under `perdure run --audit 1 --on-corruption exclude`. The faulty device is given
by its process and its number there; without one the run is undisturbed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perdure import CheckpointManager
from perdure.data import ArrayDataset
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy

FIRST_WRONG_STEP = 7
STEPS = 20


def grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(w: Any) -> Any:
        return (jnp.tanh(batch["x"] @ w) ** 2).sum() + jax.random.normal(key, ()) * w.sum()

    return {"w": jax.grad(loss)(state["w"]), "count": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    return {"w": state["w"] - 0.01 * total["w"] / total["count"]}, {}


def plant(engine: Any, process: int, device: int) -> None:
    """Make every contribution that this device computes wrong, as long as the group is whole."""
    honest = type(engine).grad

    def faulty(self: Any, fn: Any, placed: Any, share: Any, stream: Any) -> Any:
        value = honest(self, fn, placed, share, stream)
        (used,) = value["w"].devices()
        here = engine.processes.index == process
        if here and stream.step >= FIRST_WRONG_STEP and jax.local_devices().index(used) == device:
            weights = np.array(value["w"])
            weights.reshape(-1).view(np.uint32)[3] ^= np.uint32(1 << 22)
            value = {**value, "w": jax.device_put(weights, used)}
        return value

    type(engine).grad = faulty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--faulty", help="PROCESS:DEVICE:PROCESSES")
    options = parser.parse_args()
    if "JAX_NUM_PROCESSES" in os.environ:
        strategy: Any = MultiWorkerMirroredStrategy(replicas=12, seed=5)
    else:
        strategy = MirroredStrategy(replicas=12, seed=5)
    if options.faulty:
        process, device, workers = map(int, options.faulty.split(":"))
        # Without the worker the others have other numbers.
        if strategy.processes.count == workers:
            plant(strategy.engine, process, device)
    rows = np.random.default_rng(1).random((960, 16), np.float32)
    dataset = ArrayDataset({"x": rows}, batch_size=24)
    train_step = strategy.step(grad, update)
    with CheckpointManager(
        options.run,
        save_interval_steps=5,
        processes=strategy.processes,
        recipe=strategy.recipe(dataset),
    ) as manager:
        state, start = manager.restore_or_initialize({"w": jnp.ones((16, 4))})
        for step in range(start, STEPS):
            state, _ = train_step(state, strategy.batch(dataset, step))
            manager.save(step + 1, state)


if __name__ == "__main__":
    main()
