"""Keras `fit` with a journal: `keras_fit.py NAME=VALUE ...`; the names are in strategy_step.py."""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import perdure.keras

given = dict(pair.split("=") for pair in sys.argv[1:])
every = int(given.get("journal", 1)) or None
keras.utils.set_random_seed(3)
chance = np.random.default_rng(0)
x = chance.normal(size=(256, 24)).astype("float32")
y = (x.sum(1) > 0).astype("float32")


class Changed(keras.callbacks.Callback):
    """Another learning rate from the fourth batch on, and the end of the process by SIGKILL."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 3 and "rate" in given:
            model: Any = self.model
            model.optimizer.learning_rate = float(given["rate"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == int(given.get("kill_after_epoch", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


model: Any = keras.Sequential(
    [
        keras.Input((24,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
backup = perdure.keras.BackupAndRestore(
    os.path.join("runs", given.get("run", "fit")),
    save_freq=5,
    delete_checkpoint=False,
    journal_every=every,
)
model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[backup, Changed()])
