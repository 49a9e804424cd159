"""The loop of TensorFlow's guide "Training checkpoints" with perdure in place of `tf.train`, resumed
and whole; prints what it found as JSON.

Run as a program: TensorFlow stays out of the process of the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import perdure
from perdure.errors import StateError
from perdure.store import Run


class Net(tf.Module):
    """A module of TensorFlow with variables in a list and in a dict, a layer of Keras, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [tf.Variable(tf.ones((2, 2))), tf.Variable(tf.zeros(2))]
        self.scales = {"out": tf.Variable(tf.constant(1.0))}
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 2))
        self.calls = 0
        self.seen: list[Any] = []
        self.noise = np.random.default_rng(0)
        self.order = iter(tf.data.Dataset.range(9).shuffle(9).repeat())

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append({"mean": float(tf.reduce_mean(x))})
        x = x * (1 + self.noise.random() + float(next(self.order)) + self.seen[0]["mean"])
        hidden = tf.matmul(x, self.weights[0]) + self.weights[1]
        return self.dense(hidden) * self.scales["out"]


def data() -> Any:
    return tf.data.Dataset.range(20).shuffle(20).repeat().batch(2)


def train(where: Path, last: int, *, with_iterator: bool = True) -> Any:
    keras.utils.set_random_seed(1)
    net, generator = Net(), tf.random.Generator.from_seed(3)
    optimizer, step = keras.optimizers.Adam(0.1), tf.Variable(tf.constant(0))
    optimizer.build(net.trainable_variables)
    iterator, mean = iter(data()), tf.constant([0.0, 0.0])
    checkpoint: Any = perdure.Checkpoint(
        step=step, net=net, optimizer=optimizer, generator=generator, mean=mean
    )
    if with_iterator:
        checkpoint.iterator = iterator
    manager: Any = perdure.CheckpointManager
    with manager(checkpoint, where, max_to_keep=3, step_counter=step) as manager:
        checkpoint.restore(manager.latest_checkpoint)
        while int(checkpoint.step) < last:
            x = generator.normal((2, 2)) + tf.cast(next(iterator), tf.float32)[:, None]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net(x) ** 2)
            variables = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            checkpoint.mean = checkpoint.mean * 0.9 + x[0]
            checkpoint.step.assign_add(1)
            manager.save()
    values = [*net.variables, *optimizer.variables, generator.state, step, checkpoint.mean]
    return [value.numpy().tobytes().hex() for value in values], net.calls


def refusal(dataset: Any, *, is_numpy: bool = False) -> str:
    """What is said of the iterator when it is fresh and after some elements."""
    state = {"data": dataset.as_numpy_iterator() if is_numpy else iter(dataset)}
    try:
        with perdure.CheckpointManager(perdure.MemoryStorage(), recipe={}) as manager:
            manager.restore_or_initialize(state)
            for step in (1, 2):
                next(state["data"])
                manager.save(step, state)
    except StateError as error:
        return str(error)
    return ""


def places() -> list[Any]:
    """The fingerprints of one place, with as much read ahead as it happens, and the next elements after
    a restore from each."""
    found = []
    for _ in range(8):
        keras.utils.set_random_seed(0)
        storage, iterator = perdure.MemoryStorage(), iter(data())
        for _ in range(7):
            next(iterator)
        with perdure.CheckpointManager(storage, recipe={}) as manager:
            manager.restore_or_initialize({"data": iterator})
            manager.save(1, {"data": iterator})
        keras.utils.set_random_seed(0)
        fresh = {"data": iter(data())}
        with perdure.CheckpointManager(storage, recipe={}) as manager:
            manager.restore(1, fresh)
        elements = [next(fresh["data"]).numpy().tolist() for _ in range(9)]
        found.append([Run(storage).manifest(1).fingerprint, elements])
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1])
    whole, found = train(root / "whole", 6), {}
    for name, options in {"resumed": {}, "control": {"with_iterator": False}}.items():
        train(root / name, 3, **options)
        found[name] = train(root / name, 6, **options) == whole
    found["calls"] = whole[1]
    found["places"] = places()
    numbers = tf.data.Dataset.range(20)
    found["refused"] = [
        refusal(numbers.map(lambda _: tf.random.uniform((2,)))),
        refusal(numbers.shuffle(20).map(lambda number: number + 1).repeat()),
        refusal(numbers.unique()),
        refusal(numbers.shuffle(20).batch(2).repeat()),
        refusal(numbers.shuffle(20).repeat().map(lambda number: number + 2), is_numpy=True),
    ]
    sys.stdout.write(json.dumps(found))
