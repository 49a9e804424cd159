"""Small calls of `fit` that can be interrupted, and their results as bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from perdure.keras import BackupAndRestore

EPOCHS, BATCHES, BATCH = 3, 4, 6
ROWS = BATCHES * BATCH - 2  # the last batch is incomplete


class Fault(Exception):
    """The exception that interrupts a run."""


class End(NamedTuple):
    """The result of a run. Equal runs may differ in `steps`, the steps that this process ran."""

    values: dict[str, bytes]
    history: str
    epochs: list[int]
    steps: list[tuple[int, int]]


class Probe(keras.callbacks.Callback):
    """Records the steps that run, and calls `fault` after one of them."""

    def __init__(
        self,
        fault_at: tuple[int, int] | None,
        fault: Callable[[], Any] | None,
        steps: list[tuple[int, int]],
    ) -> None:
        super().__init__()
        self.at, self.fault = fault_at, fault
        self.ran = steps.append  # a list as an attribute would be saved in the backup

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ran((self.now, batch))
        if (self.now, batch) == self.at:
            _call(self.fault)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch, -1) == self.at:
            _call(self.fault)


def _call(fault: Callable[[], Any] | None) -> None:
    if fault is None:
        raise Fault
    fault()


def arrays(rows: int = ROWS) -> tuple[Any, Any]:
    x = np.random.default_rng(7).normal(size=(rows, 5)).astype("float32")
    return x, (np.arange(rows) % 3).astype("int32")


class AlwaysDropout(keras.layers.Dropout):
    """A dropout that is active in validation as well, so that validation advances its seed."""

    def call(self, inputs: Any, training: bool = True) -> Any:
        return super().call(inputs, training=True)


def network(units: int = 6, rate: float = 1e-2, mc_dropout: bool = False, **compiled: Any) -> Any:
    layers = keras.layers
    dropout = AlwaysDropout if mc_dropout else layers.Dropout
    body = [keras.Input((5,)), layers.Dense(units, activation="relu"), dropout(0.3)]
    model = keras.Sequential([*body, layers.BatchNormalization(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], **compiled)
    return model


class OfVariable(keras.losses.Loss):
    """Divides the loss by its moving mean, a variable in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"means": [keras.Variable(1.0, trainable=False)]}

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ops: Any = keras.ops
        loss, mean = ops.mean(ops.square(y_pred - 1), -1), self.parts["means"][0]
        mean.assign(0.9 * mean + 0.1 * ops.mean(loss))
        return loss / ops.stop_gradient(mean.value)


class OfAttributes(keras.losses.Loss):
    """Anneals the loss by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ops: Any = keras.ops
        self.calls += 1
        return ops.mean(ops.square(y_pred - 1), -1) / self.calls


def compiled(loss: Any = None, rate: Any = 0.02, kind: Any = keras.Sequential, **named: Any) -> Any:
    model = kind([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(3)])
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, **named)
    return model


def train(
    backup: Path | None,
    fault_at: tuple[int, int] | None = None,
    *,
    fault: Callable[[], Any] | None = None,
    save_freq: Any = 1,
    model: Any = None,
    callbacks: Any = (),
    options: dict[str, Any] | None = None,
    **fit: Any,
) -> End:
    """Run `fit` once, as a new program would. Without `backup` it has no callback of perdure.

    `callbacks` and `model` may be functions, which are called after the seed is set.
    """
    keras.utils.set_random_seed(11)
    made: Any = (model or network)()
    steps: list[tuple[int, int]] = []
    probe = Probe(fault_at, fault, steps)
    backups = [] if backup is None else [BackupAndRestore(backup, save_freq, **(options or {}))]
    others: Any = callbacks() if callable(callbacks) else callbacks
    if "x" not in fit:
        x, y = arrays()
        fit = {"x": x, "y": y, "batch_size": BATCH, **fit}
    if callable(fit["x"]):
        fit["x"] = fit["x"]()
    history: Any = made.fit(
        **{"epochs": EPOCHS, "verbose": 0, "callbacks": [*backups, *others, probe], **fit}
    )
    variables = [*made.variables, *made.optimizer.variables, *made.metrics_variables]
    values = {
        f"{number}": np.asarray(keras.ops.convert_to_numpy(variable.value)).tobytes()
        for number, variable in enumerate(variables)
    }
    return End(values, json.dumps(history.history), history.epoch, steps)


def same(one: End, other: End) -> bool:
    """Whether two runs ended with the same result. The steps of this process are not compared."""
    return one[:3] == other[:3]
