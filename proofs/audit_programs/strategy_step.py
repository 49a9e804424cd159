"""A small network in a step of a strategy, with a journal: `strategy_step.py jax|torch NAME=VALUE ...`.

`run=NAME` is the run directory below runs/, `steps=N` the last step, `rate=R` the learning rate.
`plant=KIND at=STEP` puts one error into one step, `kill=STEP` ends the process there by SIGKILL. The
number of CPU devices is JAX_NUM_CPU_DEVICES on both engines.
"""

import os
import signal
import sys
from typing import Any

import numpy as np
from audit_plants import Plant

from perdure import ArrayDataset, CheckpointManager, ManagerOptions

REPLICAS = 8
engine_name, *pairs = sys.argv[1:]
given = dict(pair.split("=") for pair in pairs)
rate = float(given.get("rate", 0.1))

chance = np.random.default_rng(0)
x = chance.normal(size=(512, 12)).astype(np.float32)
data = ArrayDataset({"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}, 64, seed=5)
first = {
    "a": (chance.normal(size=(12, 16)) * 0.3).astype(np.float32),
    "b": (chance.normal(size=(16,)) * 0.3).astype(np.float32),
}


def on_jax() -> tuple[Any, Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = jnp.tanh(batch["x"] @ w["a"]) * jax.random.bernoulli(key, 0.8, (16,))
            return (((hidden @ w["b"]) - batch["y"]) ** 2 * batch["weight"]).sum()

        return {"grads": jax.grad(loss)(state["w"]), "weight": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        mean = jax.tree.map(lambda g: g / total["weight"], total["grads"])
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, state["speed"], mean)
        w = jax.tree.map(lambda w, v: w - rate * v, state["w"], speed)
        return {"w": w, "speed": speed}, {}

    def init() -> Any:
        w = jax.tree.map(jnp.asarray, first)
        return {"w": w, "speed": jax.tree.map(jnp.zeros_like, w)}

    return MirroredStrategy, MultiWorkerMirroredStrategy, (init, grad, update), None


def on_torch() -> tuple[Any, Any, Any, Any]:
    import torch

    from perdure.torch import MirroredStrategy, MultiWorkerMirroredStrategy

    def grad(state: Any, batch: Any, _key: Any) -> Any:
        w = {name: value.detach().requires_grad_() for name, value in state["w"].items()}
        hidden = torch.dropout(torch.tanh(batch["x"] @ w["a"]), 0.2, True)
        loss = (((hidden @ w["b"]) - batch["y"]) ** 2 * batch["weight"]).sum()
        grads = torch.autograd.grad(loss, [w["a"], w["b"]])
        return {"grads": dict(zip("ab", grads, strict=True)), "weight": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        for name, value in state["w"].items():
            speed = state["speed"][name]
            speed.mul_(0.9).add_(total["grads"][name] / total["weight"])
            value.sub_(rate * speed)
        return state, {}

    def init() -> Any:
        w = {name: torch.from_numpy(value.copy()) for name, value in first.items()}
        return {"w": w, "speed": {name: torch.zeros_like(value) for name, value in w.items()}}

    devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", 1))
    return MirroredStrategy, MultiWorkerMirroredStrategy, (init, grad, update), devices


alone, together, (init, grad, update), devices = on_jax() if engine_name == "jax" else on_torch()
strategy = (together if "TF_CONFIG" in os.environ else alone)(
    devices=devices, replicas=REPLICAS, seed=3
)
plant = Plant(given.get("plant", ""), int(given.get("at", 0)), strategy)
with CheckpointManager(
    os.path.join("runs", given.get("run", "mine")),
    max_to_keep=None,
    save_interval_steps=4,
    options=ManagerOptions(journal_every=1),
    recipe=strategy.recipe(data),
    processes=strategy.processes,
) as manager:
    step_fn = strategy.step(grad, update, journal=manager.journal)
    state, start = manager.restore_or_initialize(init)
    for step in range(start, int(given.get("steps", 13))):
        plant.begin(step + 1)
        state = plant.before(state)
        batch = plant.batch(strategy.batch(data, plant.position(step)))
        state, _ = step_fn(state, batch)
        state = plant.after(state)
        manager.save(step + 1, state)
        if step + 1 == int(given.get("kill", 0)):
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
