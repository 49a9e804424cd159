"""The cases of the proof of the Keras callbacks. Imports nothing."""

MODELS = ("mlp", "cnn")
SOURCES = {
    "jax": ("arrays", "PyDataset", "tf.data"),
    "tensorflow": ("arrays", "PyDataset", "tf.data"),
    "torch": ("arrays", "PyDataset", "DataLoader"),
}
# Faults with epoch and batch, and the exit status of the process.
FAULTS = {
    "exception": [(["exception", 1, -1], 3)],
    "SIGKILL": [(["SIGKILL", 1, 3], -9)],
    # In an epoch, and in the validation after it.
    "SIGTERM": [(["SIGTERM", 1, 2], 75), (["validation", 1, 1], 75)],
    # When the first file is created, and between the data and the manifest that commits them.
    "SIGKILL in a save": [(["save", 1, 2], -9), (["commit", 1, 2], -9)],
}
LONG = {"rows": 80}  # ten batches in an epoch
BATCHES_OF_KILLS = [(epoch, batch) for epoch in range(3) for batch in range(10)]
