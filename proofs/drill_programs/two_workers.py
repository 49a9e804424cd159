"""A Trainer in a group: as many workers as there are, four logical replicas in any case."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from perdure import ArrayDataset, RunConfig, Trainer
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy

STEPS, EVERY, REPLICAS = 40, 5, 4

chance = np.random.default_rng(0)
x = chance.normal(size=(512, 32)).astype(np.float32)
data = ArrayDataset({"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}, 64)


def grad(state, batch, key):
    def loss(w):
        hidden = jnp.tanh(batch["x"] @ w["a"]) * jax.random.bernoulli(key, 0.9, (64,))
        return (((hidden @ w["b"])[:, 0] - batch["y"]) ** 2 * batch["weight"]).sum()

    return {"w": jax.grad(loss)(state["w"]), "weight": batch["weight"].sum()}


def update(state, total):
    w = jax.tree.map(lambda w, g: w - 0.05 * g / total["weight"], state["w"], total["w"])
    return {"w": w}, {}


group = "TF_CONFIG" in os.environ
strategy = (MultiWorkerMirroredStrategy if group else MirroredStrategy)(replicas=REPLICAS, seed=1)
start = {
    "w": {
        "a": jnp.asarray(chance.normal(size=(32, 64)) * 0.1, jnp.float32),
        "b": jnp.asarray(chance.normal(size=(64, 1)) * 0.1, jnp.float32),
    }
}
config = RunConfig("runs/two", save_checkpoints_steps=EVERY)
Trainer(strategy.step(grad, update), start, data, config, strategy=strategy).train(STEPS)
