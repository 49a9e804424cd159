"""The settings of the machine and the backend that can change the bits of `fit`, for the recipe.

The fields are those of the strategies (`docs/STRATEGIES.md`) that the backend has. Nothing is pinned,
because the backend has started by then: thread pools are those that the user made.
"""

from __future__ import annotations

import os
from typing import Any

import keras

from perdure.distribute.hardware import instruction_set, settings
from perdure.keras.fit_internals import torch_device


def environment() -> dict[str, Any]:
    """Fields by name, for the backend of Keras that this process has."""
    describe = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}.get(
        keras.backend.backend()
    )
    return {"keras": keras.__version__, **({} if describe is None else describe())}


def _jax() -> dict[str, Any]:
    import jax

    from perdure.distribute.hardware import xla_flags
    from perdure.distribute.jax import threads
    from perdure.distribute.jax.environment import environment as of_jax
    from perdure.distribute.jax.flags import FLAG

    device = jax.devices()[0]
    deterministic = xla_flags(os.environ).get(FLAG, "false").lower() in ("", "1", "true")
    size: int | str = os.environ.get(threads.VARIABLE, "")
    size = int(size) if size.isdigit() else threads.unpinned()
    return of_jax(device, size, deterministic or device.platform == "cpu")


def _torch() -> dict[str, Any]:
    import torch

    from perdure.distribute.torch.environment import environment as of_torch

    return of_torch(torch.device(torch_device()))


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    from perdure.distribute.jax import threads

    gpus = tf.config.list_physical_devices("GPU")
    gpu_details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    size = tf.config.threading.get_intra_op_parallelism_threads()
    one_dnn = os.environ.get("TF_ENABLE_ONEDNN_OPTS")
    flags = [f"TF_ENABLE_ONEDNN_OPTS={one_dnn}"] if one_dnn else []
    return {
        "engine": "tensorflow",
        "engine_version": f"tensorflow {tf.__version__}",
        "platform": "gpu" if gpus else "cpu",
        "instruction_set": gpu_details.get("device_name", "gpu") if gpus else instruction_set(),
        "settings": " ".join([*flags, *filter(None, [settings("gpu" if gpus else "cpu")])]),
        "threads": size or threads.unpinned(),
        "tf32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    }
