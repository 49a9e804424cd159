"""What a user of Keras 3 needs: exact resume in `fit`, and Keras models inside a strategy.

`BackupAndRestore` and `ModelCheckpoint` are callbacks for `fit`, on the JAX, the TensorFlow and the
PyTorch backend; `Stateless` brings a model into a strategy of `perdure.jax` or `perdure.torch`.
"""

from typing import Any

from perdure.errors import missing_extra
from perdure.tensorflow_names import missing

try:
    from perdure.keras.backup import BackupAndRestore
    from perdure.keras.model_checkpoint import ModelCheckpoint, load_weights
    from perdure.keras.stateless import Stateless
except ModuleNotFoundError as error:
    # Keras comes without a backend.
    backends = ("jax", "tensorflow", "torch")
    raise missing_extra(error.name if error.name in backends else "keras", error) from error

__all__ = ["BackupAndRestore", "ModelCheckpoint", "Stateless", "load_weights"]


def __getattr__(name: str) -> Any:
    raise missing("perdure.keras", name)
