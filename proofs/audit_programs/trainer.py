"""A Trainer with a strategy and a journal: `trainer.py NAME=VALUE ...`; see strategy_step.py."""

import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perdure import ArrayDataset, RunConfig, Trainer
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy
from perdure.train import Hook

given = dict(pair.split("=") for pair in sys.argv[1:])
steps, rate = int(given.get("steps", 20)), float(given.get("rate", 0.05))
chance = np.random.default_rng(0)
x = chance.normal(size=(512, 32)).astype(np.float32)
data = ArrayDataset({"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}, 64)


def grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ w["a"]) * jax.random.bernoulli(key, 0.9, (64,))
        return (((hidden @ w["b"])[:, 0] - batch["y"]) ** 2 * batch["weight"]).sum()

    value, grads = jax.value_and_grad(loss)(state["w"])
    return {"w": grads, "loss": value, "weight": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    # The changed line: another rate from the tenth step on.
    now = jnp.where(state["n"] < 9, 0.05, rate)
    w = jax.tree.map(lambda w, g: w - now * g / total["weight"], state["w"], total["w"])
    return {"w": w, "n": state["n"] + 1}, {"loss": total["loss"] / total["weight"]}


class Killed(Hook):
    """Ends the process by SIGKILL at a step."""

    def after_step(self, trainer: Any, logs: Any) -> None:
        if trainer.step == int(given.get("kill", 0)):
            trainer.manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)


group = "TF_CONFIG" in os.environ
strategy = (MultiWorkerMirroredStrategy if group else MirroredStrategy)(replicas=8, seed=1)
start = {
    "w": {
        "a": jnp.asarray(chance.normal(size=(32, 64)) * 0.1, jnp.float32),
        "b": jnp.asarray(chance.normal(size=(64, 1)) * 0.1, jnp.float32),
    },
    "n": jnp.zeros((), jnp.int32),
}
run = os.path.join("runs", given.get("run", "trainer"))
config = RunConfig(run, save_checkpoints_steps=6, journal_every=1)
trainer = Trainer(
    strategy.step(grad, update), start, data, config, strategy=strategy, hooks=[Killed()]
)
trainer.train(steps)
