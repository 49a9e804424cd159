"""One training program for a laptop, Slurm, Kubernetes, Ray and submitit: only the launcher changes.

    python train.py runs/mine --steps 400

Exit status: 0 when it is done, 75 when it was asked to end and has saved (start it again to resume),
1 when another process of its group died (start the group again). The result depends on --replicas, and
not on how many processes and devices share them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from perdure import ArrayDataset, CheckpointManager
from perdure.errors import WorkerLostError
from perdure.jax import MultiWorkerMirroredStrategy

BATCH, FEATURES, HIDDEN = 256, 64, 256
adam = optax.adam(1e-3)


def examples() -> dict[str, np.ndarray]:
    """8,192 points of a function that a small network can learn; the same in every process."""
    x = np.random.default_rng(0).normal(size=(8192, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


def init() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
        "w2": jax.random.normal(second, (HIDDEN, 1)) / HIDDEN**0.5,
    }
    return {"params": params, "opt": adam.init(params)}


def grad(state: Any, batch: Any, key: Any) -> Any:
    """One logical replica: sums over its examples."""

    def loss(params: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.9, (HIDDEN,))
        predictions = (jnp.tanh(batch["x"] @ params["w1"]) * kept @ params["w2"])[:, 0]
        return ((predictions - batch["y"]) ** 2 * batch["weight"]).sum()

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"grads": grads, "loss": value, "weight": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    """All replicas together: one step on the mean gradient."""
    mean = jax.tree.map(lambda g: g / total["weight"], total["grads"])
    change, opt = adam.update(mean, state["opt"])
    params = optax.apply_updates(state["params"], change)
    return {"params": params, "opt": opt}, {"loss": total["loss"] / total["weight"]}


def train(options: argparse.Namespace) -> None:
    # Finds its group by itself, and on a laptop there is none. Comes first, because it starts JAX.
    strategy = MultiWorkerMirroredStrategy(replicas=options.replicas)
    data = ArrayDataset(examples(), BATCH, seed=0)
    step_fn = strategy.step(grad, update)
    with CheckpointManager(
        options.run,
        save_interval_steps=options.save_every,
        recipe=strategy.recipe(data),
        processes=strategy.processes,
    ) as manager:
        state, start = manager.restore_or_initialize(init)
        if strategy.is_chief:
            print(f"{strategy.processes.count} processes, from step {start}", flush=True)
        logs = None
        for step in range(start, options.steps):
            state, logs = step_fn(state, strategy.batch(data, step))
            manager.save(step + 1, state, force=step + 1 == options.steps)
            if manager.reached_preemption(step + 1):
                manager.save_and_exit(step + 1, state)
        manager.wait_until_finished()
        if strategy.is_chief:
            loss = "" if logs is None else f", loss {float(logs['loss']):.4f}"
            fingerprint = manager.fingerprint(options.steps)
            print(f"done: step {options.steps}{loss}, fingerprint {fingerprint}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run directory or URL, the same for all processes")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--replicas", type=int, default=8, help="part of the recipe")
    parser.add_argument("--save-every", type=int, default=20)
    try:
        train(parser.parse_args(arguments))
    except WorkerLostError as error:
        print(f"train.py: {error}", file=sys.stderr, flush=True)
        # A normal exit would wait for the lost process in the shutdown of JAX.
        os._exit(1)


if __name__ == "__main__":
    main()
