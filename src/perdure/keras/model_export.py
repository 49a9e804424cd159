"""Writing a Keras model in the formats of Keras, TensorFlow, ONNX and JAX."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import keras
import numpy as np

from perdure.errors import (
    ArgumentError,
    CorruptionError,
    MissingExtraError,
    PerdureError,
    StateError,
)
from perdure.state import flatten
from perdure.state.keras_state import SEED
from perdure.store.leaf import Leaf


def write_model(model: Any, to: str, path: str) -> None:
    """Write a built model.

    `to` is "keras" (a .keras file), "saved_model" or "onnx" (`Model.export`), or "jax_export" (a
    file with the serialized `jax.export` of inference). Raises MissingExtraError, StateError.
    """
    try:
        if to == "keras":
            model.save(path)
        elif to == "jax_export":
            _write_jax_export(model, path)
        else:
            kind = {"saved_model": "tf_saved_model", "onnx": "onnx"}[to]
            if to == "onnx":  # Keras wants a model that was called
                shapes = [[size or 1 for size in tensor.shape] for tensor in model.inputs]
                zeros = [
                    keras.ops.zeros(shape, tensor.dtype)
                    for shape, tensor in zip(shapes, model.inputs, strict=True)
                ]
                model(zeros[0] if len(zeros) == 1 else zeros)
            model.export(path, format=kind, verbose=False)
    except PerdureError:
        raise
    except ImportError as error:
        raise MissingExtraError(
            f"{to}: Keras {keras.__version__} on {keras.backend.backend()} needs a package that is not "
            f"installed: {error}",
            name=error.name,
        ) from error
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        raise StateError(
            f"{to}: Keras {keras.__version__} on {keras.backend.backend()} cannot write this model: "
            f"{error}"
        ) from error


def is_seed(name: str) -> bool:
    """Whether a variable is the state of a random generator, which none of the formats holds."""
    return name.rpartition("/")[2] == SEED


def check_keras_file(path: str, expected: dict[str, Leaf]) -> None:
    """Load a .keras file, and compare its variables with the leaves, seeds aside, or
    CorruptionError.
    """
    found = flatten(keras.saving.load_model(path, compile=False))
    for name, leaf in expected.items():
        if is_seed(name):
            continue
        other = found.get(name)
        if other is None or (other.dtype, other.shape, other.hashes()) != (
            leaf.dtype,
            leaf.shape,
            leaf.hashes(),
        ):
            raise CorruptionError(
                f"{path}: the variable {name!r} reads back as "
                f"{'nothing' if other is None else other.describe()}, and not with the bytes of the "
                f"checkpoint, {leaf.describe()}. The export was removed."
            )


def _write_jax_export(model: Any, path: str) -> None:
    if keras.backend.backend() != "jax":
        raise ArgumentError(
            f"jax_export: expected Keras on the JAX backend, found {keras.backend.backend()}; set "
            f"KERAS_BACKEND=jax."
        )
    jax: Any = import_module("jax")
    export: Any = import_module("jax.export")
    weights = [np.asarray(variable.value) for variable in model.trainable_variables]
    others = [np.asarray(variable.value) for variable in model.non_trainable_variables]

    def call(*inputs: Any) -> Any:
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        return model.stateless_call(weights, others, given, training=False)[0]

    (batch,) = export.symbolic_shape("batch")
    arguments = [
        jax.ShapeDtypeStruct(
            tuple(batch if size is None else size for size in tensor.shape), tensor.dtype
        )
        for tensor in model.inputs
    ]
    data = export.export(jax.jit(call))(*arguments).serialize()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
