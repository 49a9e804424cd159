"""The training program of the proof of the loop: a Trainer on JAX, alone or as a worker of a group.

It prints its progress as JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perdure import ArrayDataset, RunConfig, Trainer
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy
from perdure.train import EarlyStopping, Hook, ReduceLROnPlateau

STEPS = 120
SUMMARY = 3
EVERY = 15


class Tell(Hook):
    def begin(self, trainer: Trainer) -> None:
        print(json.dumps({"event": "begin", "step": trainer.step}), flush=True)

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        jax.block_until_ready(trainer.state)
        print(json.dumps({"event": "step", "step": trainer.step}), flush=True)


def grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ w["a"]) * jax.random.bernoulli(key, 0.9, (256,))
        errors = ((hidden @ w["b"])[:, 0] - batch["y"]) ** 2
        return (errors * batch["weight"]).sum()

    value, g = jax.value_and_grad(loss)(state["w"])
    return {"w": g, "loss": value, "weight": batch["weight"].sum()}


def update(state: Any, total: Any) -> tuple[Any, Any]:
    rate = state["rate"] / total["weight"]
    w = jax.tree.map(lambda w, g: w - rate * g, state["w"], total["w"])
    return {**state, "w": w}, {"loss": total["loss"] / total["weight"]}


def evaluate(state: Any, batch: Any) -> Any:
    predictions = (jnp.tanh(batch["x"] @ state["w"]["a"]) @ state["w"]["b"])[:, 0]
    weight = batch["weight"]
    return {
        "error": {"sum": (abs(predictions - batch["y"]) * weight).sum(), "weight": weight.sum()}
    }


def main(where: str) -> None:
    chance = np.random.default_rng(0)
    x = chance.normal(size=(2048, 64)).astype(np.float32)
    arrays = {"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}
    data = ArrayDataset(arrays, 256)
    test = ArrayDataset({name: array[:1024] for name, array in arrays.items()}, 256, shuffle=False)
    kind = MultiWorkerMirroredStrategy if "TF_CONFIG" in os.environ else MirroredStrategy
    strategy = kind(replicas=4, seed=1)
    state = {
        "w": {
            "a": jnp.asarray(chance.normal(size=(64, 256)), jnp.float32) * 0.1,
            "b": jnp.asarray(chance.normal(size=(256, 1)), jnp.float32) * 0.1,
        },
        "rate": jnp.float32(0.05),
    }
    hooks = [Tell(), ReduceLROnPlateau("rate", "error", patience=1, min_delta=0.05)]
    config = RunConfig(where, save_checkpoints_steps=7, save_summary_steps=SUMMARY)
    Trainer(
        strategy.step(grad, update),
        state,
        data,
        config,
        [*hooks, EarlyStopping("error", patience=99)],
        strategy=strategy,
        eval_fn=jax.jit(evaluate),
    ).train_and_evaluate(test, STEPS, every=EVERY)


if __name__ == "__main__":
    main(sys.argv[1])
