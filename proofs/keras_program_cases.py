"""What the proof of the Keras callbacks goes through. Imports nothing."""

MODELS = ("mlp", "cnn")
SOURCES = {
    "jax": ("arrays", "PyDataset", "tf.data"),
    "tensorflow": ("arrays", "PyDataset", "tf.data"),
    "torch": ("arrays", "PyDataset", "DataLoader"),
}
# Each with faults, epoch and batch, and the status that they end the process with.
FAULTS = {
    "exception": [(["exception", 1, -1], 3)],
    "SIGKILL": [(["SIGKILL", 1, 3], -9)],
    # In an epoch, and in the validation behind it.
    "SIGTERM": [(["SIGTERM", 1, 2], 75), (["validation", 1, 1], 75)],
    # As the first file is begun, and between the data and the manifest that makes them count.
    "SIGKILL in a save": [(["save", 1, 2], -9), (["commit", 1, 2], -9)],
}
LONG = {"rows": 80}  # ten batches in an epoch
BATCHES_OF_KILLS = [(epoch, batch) for epoch in range(3) for batch in range(10)]
