"""The Keras model of the matrix and its optimizers, the same on both backends."""

from __future__ import annotations

from typing import Any

import keras


def keras_optimizer(name: str) -> Any:
    of = keras.optimizers
    schedule = of.schedules.CosineDecay(1e-4, 8, warmup_target=2e-3, warmup_steps=2)
    return {
        "sgd": lambda: of.SGD(0.05, momentum=0.9),
        "adam": lambda: of.Adam(1e-3),
        "rmsprop": lambda: of.RMSprop(1e-3),
        "adamw": lambda: of.AdamW(schedule, weight_decay=0.01),  # pyright: ignore[reportArgumentType],
    }[name]()


def keras_model(seed: int) -> Any:
    """Convolution, BatchNormalization and dropout."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(8, 3, strides=2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=seed),
            layers.Dense(10),
        ]
    )
