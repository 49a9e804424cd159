"""Training steps on TensorFlow, written as in its tutorials on custom training and workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}

from distribute_case import Group, data

Step = Callable[[], float]


def mirrored(group: Group, batch: str, devices: str) -> Step:
    import tensorflow as tf

    count = int(devices)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{n}" for n in range(count)])
    return _step(strategy, int(batch))


def workers(group: Group, batch: str) -> Step:
    host, port = group.coordinator.split(":")
    addresses = [f"{host}:{int(port) + n}" for n in range(group.processes)]
    task = {"type": "worker", "index": group.process}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    return _step(tf.distribute.MultiWorkerMirroredStrategy(), int(batch))


def _step(strategy: Any, batch: int) -> Step:
    import tensorflow as tf

    layers = tf.keras.layers
    x, y = data("cnn", batch)
    dataset = tf.data.Dataset.from_tensor_slices((x[..., None], y)).batch(batch).cache().repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        optimizer = tf.keras.optimizers.Adam()
        model.build((None, 28, 28, 1))
        optimizer.build(model.trainable_variables)

    def replica(inputs: Any) -> Any:
        x, y = inputs
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=batch)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(inputs: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=(inputs,)), axis=None)

    return lambda: float(train_step(next(iterator)))
