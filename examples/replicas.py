"""Custom training on replicas: the same bits on one device and on two.

TensorFlow's tutorial "Custom training with tf.distribute.Strategy": `compute_average_loss`, metrics, a
dataset that is iterated over inside one call, and a checkpoint that is restored without the strategy.

    python examples/replicas.py --data PATH --epochs 10
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before the first import of JAX: two devices of one CPU. Real accelerators need no such line.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp
import optax
from common import options, prove

import perdure
from perdure.demo.digits import load_digits
from perdure.jax import MirroredStrategy, compute_average_loss, metrics

REPLICAS = 4  # part of the recipe; the number of devices is not
args = options(__doc__, epochs=3, batch=128)
digits = load_digits(args.data)
train_data = perdure.ArrayDataset(digits.train, args.batch, seed=0)
test_data = perdure.ArrayDataset(digits.test, args.batch, shuffle=False)
adam = optax.adam(1e-2)
train_loss, train_accuracy = metrics.Mean(), metrics.SparseCategoricalAccuracy()


def fresh() -> dict[str, Any]:
    k1, k2 = jax.random.split(jax.random.key(0))
    he = jax.nn.initializers.he_normal()
    params = {"w1": he(k1, (784, 64)), "w2": he(k2, (64, 10))}
    accumulators = {"loss": train_loss.init(), "accuracy": train_accuracy.init()}
    return {"params": params, "opt": adam.init(params), **accumulators}


@jax.jit
def forward(params: Any, image: Any) -> Any:
    return jax.nn.relu(image.reshape(len(image), -1) @ params["w1"]) @ params["w2"]


def grad(state: Any, batch: Any, key: Any) -> Any:
    """One logical replica. The results of all are summed, so each divides by the whole batch."""

    def loss_fn(params: Any) -> Any:
        logits = forward(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        # Rows that pad the last batch of an epoch weigh 0.
        return compute_average_loss(losses, batch["weight"], args.batch), (losses, logits)

    (_, (per_example, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return {
        "grads": grads,
        "loss": train_loss.contribution(per_example, batch["weight"]),
        "accuracy": train_accuracy.contribution(batch["label"], logits, batch["weight"]),
    }


def update(state: Any, total: Any) -> Any:
    """Update once for all replicas, with the sum of their results."""
    changes, opt = adam.update(total["grads"], state["opt"])
    params = optax.apply_updates(state["params"], changes)
    loss = train_loss.merge(state["loss"], total["loss"])
    accuracy = train_accuracy.merge(state["accuracy"], total["accuracy"])
    return {"params": params, "opt": opt, "loss": loss, "accuracy": accuracy}, {}


def train(directory: Path, devices: int) -> float:
    """Train all epochs under the strategy; return the accuracy on the test images."""
    strategy = MirroredStrategy(devices, REPLICAS)
    train_step = strategy.step(grad, update)
    batches = strategy.distribute_dataset(train_data)
    recipe = strategy.recipe(train_data)
    with perdure.CheckpointManager(directory, recipe=recipe) as manager:
        state, start = manager.restore_or_initialize(fresh)
        for epoch in range(start // batches.steps_per_epoch, args.epochs):
            state |= {"loss": train_loss.init(), "accuracy": train_accuracy.init()}
            state, _ = train_step.many(state, batches.epoch(epoch))  # all of its steps in one call
            manager.save(batches.steps_per_epoch * (epoch + 1), state)
            loss = train_loss.result(state["loss"])
            accuracy = train_accuracy.result(state["accuracy"])
            print(
                f"{devices} device(s), epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.2%}"
            )
    with strategy.scope():
        accuracy = metrics.SparseCategoricalAccuracy()

    def test_step(batch: Any) -> None:
        accuracy.update_state(
            batch["label"], forward(state["params"], batch["image"]), batch["weight"]
        )

    for batch in strategy.distribute_dataset(test_data):
        strategy.run(test_step, args=(batch,))
    return accuracy.result()


def main() -> None:
    one, two = args.directory / "one-device", args.directory / "two-devices"
    train(one, devices=1)
    under_strategy = train(two, devices=2)

    params = perdure.load_checkpoint(two, leaves="params")[
        "params"
    ]  # arrays, without a strategy and its devices
    right = forward(params, digits.test["image"]).argmax(-1) == digits.test["label"]
    print(
        f"test accuracy: {under_strategy:.2%}, restored without the strategy: {jnp.mean(right):.2%}"
    )
    assert int(right.sum()) == round(under_strategy * len(right))
    prove(one, two)


if __name__ == "__main__":
    main()
