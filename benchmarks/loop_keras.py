"""The time that a backup every ten steps adds to Keras's `fit`: perdure's, Keras's own, and none."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from perdure.keras import BackupAndRestore

BATCHES, EVERY = 60, 10


def fit_case(rounds: int) -> dict[str, list[float]]:
    """Seconds per step with each callback, in turns. The model is 2.4 MB with Adam."""
    layers = [keras.Input((256,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(128)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    rows = np.random.default_rng(0).normal(size=(BATCHES * 64, 256)).astype("float32")
    target = np.zeros((len(rows), 128), "float32")
    times: dict[str, list[float]] = {"none": [], "perdure": [], "keras": []}
    for turn in range(rounds + 1):
        for who, seconds in times.items():
            with tempfile.TemporaryDirectory(prefix="perdure-fit-") as name:
                theirs: Any = keras.callbacks.BackupAndRestore
                kinds = {"none": None, "perdure": BackupAndRestore, "keras": theirs}
                kind = kinds[who]
                callbacks = [] if kind is None else [kind(f"{name}/run", EVERY)]
                begin = time.perf_counter()
                options: dict[str, Any] = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
                model.fit(rows, target, 64, **options)
                if turn:  # the first run compiles
                    seconds.append((time.perf_counter() - begin) / (2 * BATCHES))
    return times


def overheads(rounds: int) -> tuple[list[float], list[float], float]:
    """Seconds that perdure's and Keras's callback add to a step, per round, and those of the step."""
    times = fit_case(rounds)
    pairs = [
        [with_one - bare for with_one, bare in zip(times[who], times["none"], strict=True)]
        for who in ("perdure", "keras")
    ]
    return pairs[0], pairs[1], statistics.median(times["none"])
