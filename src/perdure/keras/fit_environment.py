"""What of the machine and of the backend decides the bits of `fit`: a part of a backup's recipe.

The fields are those of the strategies (`docs/RECIPE.md`) as far as the backend has them. `fit` pins
nothing, because the backend has begun by then: thread pools are those that the user made.
"""

from __future__ import annotations

import os
from typing import Any

import keras

from perdure.distribute.hardware import instruction_set, settings


def environment() -> dict[str, Any]:
    """Fields by name, for the backend of Keras that this process has."""
    made = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}.get(keras.backend.backend())
    return {"keras": keras.__version__, **({} if made is None else made())}


def _jax() -> dict[str, Any]:
    import jax

    from perdure.distribute.hardware import xla_flags
    from perdure.distribute.jax import threads
    from perdure.distribute.jax.environment import environment as of_jax
    from perdure.distribute.jax.flags import FLAG

    device = jax.devices()[0]
    asked = xla_flags(os.environ).get(FLAG, "false").lower() in ("", "1", "true")
    size: int | str = os.environ.get(threads.VARIABLE, "")
    size = int(size) if size.isdigit() else threads.unpinned()
    return of_jax(device, size, asked or device.platform == "cpu")


def _torch() -> dict[str, Any]:
    import torch
    from keras.src.backend.torch.core import get_device

    from perdure.distribute.torch.environment import environment as of_torch

    return of_torch(torch.device(get_device()))


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    from perdure.distribute.jax import threads

    gpus = tf.config.list_physical_devices("GPU")
    of_gpu = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    size = tf.config.threading.get_intra_op_parallelism_threads()
    one_dnn = os.environ.get("TF_ENABLE_ONEDNN_OPTS")
    own = [f"TF_ENABLE_ONEDNN_OPTS={one_dnn}"] if one_dnn else []
    return {
        "engine": "tensorflow",
        "engine_version": f"tensorflow {tf.__version__}",
        "platform": "gpu" if gpus else "cpu",
        "instruction_set": of_gpu.get("device_name", "gpu") if gpus else instruction_set(),
        "settings": " ".join([*own, *filter(None, [settings("gpu" if gpus else "cpu")])]),
        "threads": size or threads.unpinned(),
        "tf32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    }
