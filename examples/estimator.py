"""Estimator-style training that fails at step 5 and resumes from its last checkpoint.

TensorFlow's migration guide "Fault tolerance": a `SessionRunHook` that raises, a `RunConfig` with a
checkpoint in every step, and the same call of `train` once more.

    python examples/estimator.py --data PATH --steps 100
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import options, prove

import perdure
from perdure.demo.digits import load_digits
from perdure.train import Hook

args = options(__doc__, steps=10, batch=128)
digits = load_digits(args.data)
train_data = perdure.ArrayDataset(digits.train, args.batch, seed=0)
eval_data = perdure.ArrayDataset(digits.test, args.batch, shuffle=False)
adam = optax.adam(1e-3)


def fresh(seed: int) -> dict[str, Any]:
    """The whole state of training. The dropout of a step is a function of `step`."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = [(784, 256), (256, 32), (32, 10)]
    he = jax.nn.initializers.he_normal()
    params = [
        {"w": he(key, size), "b": jnp.zeros(size[1])} for key, size in zip(keys, sizes, strict=True)
    ]
    return {"params": params, "opt": adam.init(params), "step": 0, "key": jax.random.key(seed)}


def network(params: Any, image: Any, key: Any = None) -> Any:
    x = image.reshape(len(image), -1)
    for number, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        if number < len(params) - 1:
            x = jax.nn.relu(x)
            if key is not None:
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
                x = x * kept / 0.8
    return x


@jax.jit
def step_fn(state: Any, batch: Any) -> tuple[Any, Any]:
    """One training step: an estimator's `model_fn` in mode TRAIN."""
    key = jax.random.fold_in(state["key"], state["step"])

    def loss_fn(params: Any) -> Any:
        logits = network(params, batch["image"], key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return (losses * batch["weight"]).sum() / batch["weight"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    changes, opt = adam.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], changes)
    return {**state, "params": params, "opt": opt, "step": state["step"] + 1}, {"loss": loss}


@jax.jit
def eval_fn(state: Any, batch: Any) -> Any:
    """Mode EVAL: metrics as (sum, weight) pairs."""
    right = network(state["params"], batch["image"]).argmax(-1) == batch["label"]
    return {"accuracy": ((right * batch["weight"]).sum(), batch["weight"].sum())}


class InterruptAtStep(Hook):
    """Raises, as a failing machine would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: perdure.Trainer, logs: Any) -> None:
        if trainer.step == self.step:
            raise RuntimeError(f"interrupted at step {self.step}")


def trainer(model_dir: Path, hooks: Any = ()) -> perdure.Trainer:
    config = perdure.RunConfig(model_dir, save_checkpoints_steps=1, save_summary_steps=1, seed=1)
    return perdure.Trainer(step_fn, fresh, train_data, config, hooks, eval_fn=eval_fn)


def main() -> None:
    trainer(args.directory / "undisturbed").train(max_steps=args.steps)

    model_dir = args.directory / "interrupted"
    try:
        trainer(model_dir, [InterruptAtStep(5)]).train(max_steps=args.steps)
    except RuntimeError as error:
        print(f"the first run: {error}")
    again = trainer(model_dir)  # the same call, in this process or in a new one
    again.train(max_steps=args.steps)
    print(f"the second run: at step {again.step}, {again.evaluate(eval_data)}")
    prove(args.directory / "undisturbed", model_dir)


if __name__ == "__main__":
    main()
