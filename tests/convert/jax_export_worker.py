"""Exports that need JAX: a Keras model with its code, and Orbax both ways. Prints one JSON object."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.export
import keras
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from perdure import CheckpointManager
from perdure.convert import export, import_run
from perdure.errors import ArgumentError, MismatchError, PerdureError
from perdure.store import Run

# Keras hands its variables to NumPy 2, which warns that their `__array__` is outdated.
warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)

BUILD = """
import keras

def build(units=3):
    return keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(units), keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5), keras.layers.Dense(2),
    ])

def other():
    return build(5)
"""


def kind_of_error(call: Any) -> str:
    try:
        call()
    except PerdureError as error:
        return type(error).__name__
    return "none"


def keras_formats(folder: Path) -> dict[str, Any]:
    code = folder / "build.py"
    code.write_text(BUILD)
    scope: dict[str, Any] = {}
    exec(BUILD, scope)
    keras.utils.set_random_seed(1)
    model = scope["build"]()
    for variable in model.layers[1].variables:
        variable.assign(np.linspace(0.5, 2, 3))
    run = folder / "run"
    with CheckpointManager(run) as manager:
        manager.save(1, {"model": model, "step": 1})
    inputs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    expected = np.asarray(jax.jit(lambda x: model(x, training=False))(inputs))

    done = export(run, "keras", folder / "m.keras", model=f"{code}:build", verify=True)
    loaded: Any = keras.saving.load_model(folder / "m.keras")
    variables = zip(loaded.weights, model.weights, strict=True)  # without the seed of Dropout
    export(run, "jax_export", folder / "m.bin", model=scope["build"])
    called = jax.export.deserialize(bytearray((folder / "m.bin").read_bytes())).call(inputs)
    return {
        "files": done.files,
        "left_out": done.left_out,
        "variables": all(np.array_equal(a.value, b.value) for a, b in variables),
        "call": bool(np.array_equal(called, expected)),
        "misfit": kind_of_error(
            lambda: export(run, "keras", folder / "x.keras", model=scope["other"])
        ),
        "no function": kind_of_error(
            lambda: export(run, "keras", folder / "x.keras", model=f"{code}:no")
        ),
        "verify": kind_of_error(
            lambda: export(run, "onnx", folder / "x", model=scope["build"], verify=True)
        ),
        "expected": [MismatchError.__name__, ArgumentError.__name__, ArgumentError.__name__],
        "left": sorted(path.name for path in folder.iterdir() if path.suffix == ".tmp"),
    }


def orbax(folder: Path) -> dict[str, Any]:
    state = {
        "params": {
            "w": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.arange(3).astype(ml_dtypes.bfloat16),
            "scale": np.array(2.5),
        },
        "step": 3,
        "name": "x",
    }
    run = folder / "arrays"
    with CheckpointManager(run) as manager:
        manager.save(1, {**state, "raw": b"1"})
    fingerprint = Run(run).manifest(1).fingerprint
    done = export(run, "orbax", folder / "orbax", verify=True)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder / "orbax")
    back = import_run(folder / "orbax", folder / "back")
    sharded = {"params": {"w": jax.numpy.ones((4, 2), "bfloat16")}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", sharded)
    standard = import_run(folder / "standard", folder / "from-standard", branch="train")
    return {
        "arrays": all(
            np.asarray(tree["params"][name]).tobytes() == array.tobytes()
            for name, array in state["params"].items()
        ),
        "scalars": [tree["step"], tree["name"]],
        "left_out": done.left_out,
        "back": [[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in back.leaves],
        "changed": back.fingerprint != fingerprint,
        "standard": [[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in standard.leaves],
        "no such": kind_of_error(lambda: import_run(folder, folder / "y", kind="orbax")),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.stdout.write(json.dumps({"keras": keras_formats(place), "orbax": orbax(place)}) + "\n")
