"""Keras fit with perdure's callback, and nothing else of perdure. KERAS_BACKEND says on what."""

import keras
import numpy as np

import perdure.keras

keras.utils.set_random_seed(3)
chance = np.random.default_rng(0)
x = chance.normal(size=(384, 24)).astype("float32")
y = (x.sum(1) > 0).astype("float32")

model = keras.Sequential(
    [
        keras.Input((24,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
backup = perdure.keras.BackupAndRestore(
    "runs/fit", save_freq=4, delete_checkpoint=False, save_before_preemption=True
)
model.fit(x, y, batch_size=32, epochs=4, verbose=0, callbacks=[backup])
