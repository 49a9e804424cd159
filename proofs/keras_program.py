"""Runs of `fit` for the proof of the Keras callbacks, each in a process of its own.

Started with a backend in the environment, it imports everything once and then forks a process for
each run that a line of its input asks for (before a fork, nothing of a framework has run). A run
writes the digest of its result; a fault ends it before that.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

import perdure.keras

try:  # imported here, because Keras would otherwise import it in every forked process
    import tensorflow as tf
except ImportError:
    tf = None
from perdure.store import LocalStorage
from perdure.store.format import MANIFESTS

EPOCHS, BATCHES, BATCH = 3, 6, 8
ROWS = BATCHES * BATCH - 3  # the last batch is incomplete


class Fault(Exception):
    """The exception that interrupts a run."""


class Program(keras.callbacks.Callback):
    """Records the steps that a process runs, and applies the fault of the case at its place."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self._kind, self._epoch, self._batch = case.get("fault") or ("", 0, 0)
        self._log = Path(case["log"])
        self._at = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at = epoch
        if (self._kind, epoch) == ("exception", self._epoch):
            raise Fault

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._log.open("a") as file:
            file.write(f"{self._at} {batch}\n")
        if (self._at, batch) == (self._epoch, self._batch):
            if self._kind in ("SIGKILL", "SIGTERM"):
                os.kill(os.getpid(), getattr(signal, self._kind))
            if self._kind in ("save", "commit"):
                _die_in_the_next_save(self._kind == "commit")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._kind, self._at, batch) == ("validation", self._epoch, self._batch):
            os.kill(os.getpid(), signal.SIGTERM)


def _die_in_the_next_save(in_commit: bool) -> None:
    """Kill the process in the next save: of perdure's callback when it creates a file or between the
    data and the manifest, of Keras's between its two files."""

    def die(*given: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if in_commit:
        create = LocalStorage.create

        def create_or_die(storage: LocalStorage, name: str, size: int) -> Any:
            sink = create(storage, name, size)
            if name.startswith(MANIFESTS):
                sink.commit = die
            return sink

        LocalStorage.create = create_or_die  # type: ignore[method-assign]
    else:
        LocalStorage.create = die  # type: ignore[method-assign]
        LocalStorage.replace = die  # type: ignore[method-assign]
    saves = keras.Model.save_weights

    def save_and_die(model: Any, *given: Any, **named: Any) -> None:
        saves(model, *given, **named)
        die()

    setattr(keras.Model, "save_weights", save_and_die)  # noqa: B010


def arrays(model: str, rows: int = ROWS) -> tuple[Any, Any]:
    chance = np.random.default_rng(7)
    shape = (rows, 8, 8, 1) if model == "cnn" else (rows, 6)
    x = chance.normal(size=shape).astype("float32")
    return x, (np.arange(rows) % 3).astype("int32")


class Indexed(keras.utils.PyDataset):
    """A batch as a function of its index."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._x, self._y = arrays(model)

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self._x[rows], self._y[rows]


def source(kind: str, model: str, rows: int) -> dict[str, Any]:
    """The arguments of `fit` for the data."""
    x, y = arrays(model, rows)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": True}
    if kind == "PyDataset":
        return {"x": Indexed(model), "shuffle": True}
    if kind == "tf.data":
        assert tf is not None
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)
        return {"x": data, "shuffle": False}
    torch.manual_seed(11)  # Keras seeds torch only on its torch backend
    data = torch.utils.data
    both = data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {"x": data.DataLoader(both, batch_size=BATCH, shuffle=True), "shuffle": False}


def network(kind: str) -> Any:
    layers = keras.layers
    if kind == "mlp":
        body = [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dropout(0.3)]
    else:
        body = [
            keras.Input((8, 8, 1)),
            layers.RandomFlip(),
            layers.RandomTranslation(0.2, 0.2),
            layers.Conv2D(3, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
        ]
    model = keras.Sequential([*body, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def callback(case: dict[str, Any]) -> list[Any]:
    every, where = case.get("every", 2), case["backup"]
    if case["who"] == "perdure":
        return [perdure.keras.BackupAndRestore(where, every, save_before_preemption=True)]
    if case["who"] == "keras":
        return [keras.callbacks.BackupAndRestore(where, every)]
    return []


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Call `fit` once; raises or is killed at the place of the fault."""
    keras.utils.set_random_seed(11)
    model = network(case["model"])
    validation = arrays(case["model"])
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)
    history = model.fit(
        **source(case["data"], case["model"], case.get("rows", ROWS)),
        epochs=case.get("epochs", EPOCHS),
        validation_data=validation,
        validation_batch_size=16,
        callbacks=[*callback(case), plateau, Program(case)],
        verbose=0,
    )
    digest = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        value: Any = variable.value
        digest.update(np.asarray(keras.ops.convert_to_numpy(value)).tobytes())
    return {
        "digest": digest.hexdigest(),
        "iterations": int(np.asarray(keras.ops.convert_to_numpy(model.optimizer.iterations.value))),
        "history": json.dumps(history.history),
    }


def child(case: dict[str, Any]) -> int:
    """Run a case in a forked process; return its status: 0 finished, 1 an error, else by the fault."""
    os.environ["PERDURE_CASE"] = case["log"]
    try:
        Path(case["result"]).write_text(json.dumps(run(case)))
    except Fault:
        return 3
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001 (the process ends here; whoever waits reads what it was)
        Path(case["result"]).write_text(traceback.format_exc())
        return 1
    return 0


def main() -> None:
    """Run the case of each line of the input and answer with its status."""
    for line in sys.stdin:
        case = json.loads(line)
        if (pid := os.fork()) == 0:
            status = child(case)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, ended = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main()
