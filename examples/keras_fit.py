"""Keras `fit` with `BackupAndRestore`, interrupted in epoch 5.

TensorFlow's migration guide "Fault tolerance" and Keras's page of the callback: one import differs, and
the interrupted run ends with the bits of an undisturbed one, dropout and shuffled batches included.

    python examples/keras_fit.py --data PATH --epochs 10
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from common import options, prove

import perdure
from perdure.demo.digits import load_digits
from perdure.keras import BackupAndRestore

args = options(__doc__, epochs=6, batch=128)
digits = load_digits(args.data)


class InterruptInEpoch5(keras.callbacks.Callback):
    """Raises in the middle of an epoch, as a failing machine would."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch + 1  # Keras counts from 0, and its progress bar from 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 5 and batch == 1:
            raise RuntimeError("interrupted in epoch 5")


def build() -> keras.Model:
    keras.utils.clear_session()  # as in a new process
    keras.utils.set_random_seed(0)
    layers = [keras.Input((28, 28, 1)), keras.layers.Flatten()]
    layers += [keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def fit(directory: Path, *callbacks: Any) -> Any:
    """Make the same call before and after the interruption."""
    model = build()
    history = model.fit(
        digits.train["image"],
        digits.train["label"],
        batch_size=args.batch,
        epochs=args.epochs,
        callbacks=[BackupAndRestore(directory / "backup"), *callbacks],
        verbose=2,  # pyright: ignore[reportArgumentType]
    ).history
    # A finished fit deletes its backup, so save its result for the comparison:
    perdure.Checkpoint(model=model, optimizer=model.optimizer).save(directory / "end", args.epochs)
    return history


def main() -> None:
    undisturbed, interrupted = args.directory / "undisturbed", args.directory / "interrupted"
    expected = fit(undisturbed)
    try:
        fit(interrupted, InterruptInEpoch5())
    except RuntimeError as error:
        print(error)
    history = fit(interrupted)
    assert history == expected, f"History differs: {history} and {expected}"
    prove(undisturbed / "end", interrupted / "end")


if __name__ == "__main__":
    main()
