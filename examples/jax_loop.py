"""A JAX loop with `jit` and optax, interrupted between two checkpoints.

The numbered lines are what a plain loop has to add.

    python examples/jax_loop.py --data PATH --steps 500
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import options, prove

import perdure  # 1
from perdure.demo.digits import load_digits

args = options(__doc__, steps=60, batch=64)
digits = load_digits(args.data)
dataset = perdure.ArrayDataset(
    digits.train, args.batch, seed=0
)  # a batch is a function of the step
adam = optax.adam(1e-3)


def init() -> dict[str, Any]:
    first, second, dropout = jax.random.split(jax.random.key(0), 3)
    he = jax.nn.initializers.he_normal()
    params = {"w1": he(first, (784, 64)), "w2": he(second, (64, 10))}
    return {"params": params, "opt": adam.init(params), "key": dropout}


@partial(jax.jit, donate_argnums=0)
def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    key, dropout = jax.random.split(state["key"])

    def loss_fn(params: Any) -> Any:
        hidden = jax.nn.relu(batch["image"].reshape(len(batch["image"]), -1) @ params["w1"])
        kept = jax.random.bernoulli(dropout, 0.8, hidden.shape)
        logits = hidden * kept / 0.8 @ params["w2"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return (losses * batch["weight"]).sum() / jnp.maximum(batch["weight"].sum(), 1)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    changes, opt = adam.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], changes), "opt": opt, "key": key}, loss


def train(directory: Path, fails_at: int | None = None) -> None:
    with perdure.CheckpointManager(directory, save_interval_steps=10) as manager:  # 2
        state, start = manager.restore_or_initialize(init)  # 3
        print(f"resuming after step {start}" if start else "starting from scratch")
        for step in range(start, args.steps):  # 4
            if step == fails_at:
                raise RuntimeError(f"interrupted in step {step}")
            state, loss = train_step(state, dataset.batch(step))
            if manager.save(step + 1, state):  # 5
                print(f"saved step {step + 1}, loss {loss:.4f}")


def main() -> None:
    train(args.directory / "undisturbed")

    try:
        train(args.directory / "interrupted", fails_at=args.steps // 2 + 5)
    except RuntimeError as error:
        print(error)
    train(args.directory / "interrupted")
    prove(args.directory / "undisturbed", args.directory / "interrupted")


if __name__ == "__main__":
    main()
