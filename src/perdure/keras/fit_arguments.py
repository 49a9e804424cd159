"""The arguments of `compile` and `fit`, field by field: the recipe of a backup."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import blake3
import keras
import numpy as np

from perdure.data.sources import ArraySource
from perdure.errors import PerdureError
from perdure.keras import fit_batches
from perdure.keras.fit_internals import RunningFit, compiled_metrics, torch_device
from perdure.runtime.environment import present_jax_settings, tensorflow_settings, torch_settings
from perdure.state.keras_state import variables_by_path

Description = dict[str, bool | int | float | str]

# Not `epochs`: the bits at a step do not depend on it, so a resumed fit may train for longer.
_ARGUMENTS = ("batch_size", "initial_epoch", "shuffle", "steps_per_epoch")
_ARGUMENTS += ("validation_batch_size", "validation_freq", "validation_split", "validation_steps")
# Learning rates change while an optimizer is used. By optimizer: its config when `fit` first saw it.
_first_configs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def describe(fit: RunningFit, callbacks: Mapping[str, Any]) -> Description:
    """Fields by a dotted path, such as `fit.batch_size` and `model.layers.2.config.units`."""
    model, arguments = fit.model, fit.arguments
    optimizer, metrics = model.optimizer, compiled_metrics(model)
    if optimizer is not None and optimizer not in _first_configs:
        _first_configs[optimizer] = _config(optimizer)
    settings: dict[str, Any] = {
        "keras.backend": keras.backend.backend(),
        "keras.dtype": keras.config.dtype_policy().name,
        "environment": _environment(),
        "fit": {
            **{name: arguments.get(name) for name in _ARGUMENTS},
            "class_weight": _config(arguments.get("class_weight")),
            "callbacks": dict(callbacks),
        },
        "data": fit_batches.describe(fit.iterator.data),
        "validation_data": _content(arguments.get("validation_data")),
    }
    named: dict[str, Any] = {
        "model": _config(model),
        "compile": {
            "optimizer": _first_configs.get(optimizer),
            "loss": _config(getattr(model, "loss", None)),
            "metrics": [] if metrics is None else [_config(metrics)],
            "steps_per_execution": model.steps_per_execution,
            "run_eagerly": model.run_eagerly,
            "jit_compile": bool(model.jit_compile),
        },
    }
    variables = {
        f"variables.{path}": f"{variable.dtype} {tuple(variable.shape)}"
        for path, variable in variables_by_path(model).items()
    }
    return _flat(settings) | _flat(_renumbered(named, {}, Counter())) | variables


def _content(data: Any) -> Any:
    """The fingerprint of arrays, the class of other data."""
    if data is None:
        return None
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    # NumPy treats anything with a length and indices as a sequence: it would read a whole PyDataset.
    if not all(hasattr(leaf, "__array__") or isinstance(leaf, (int, float)) for leaf in leaves):
        return type(data).__name__
    try:
        return ArraySource(tuple(np.asarray(leaf) for leaf in leaves)).fingerprint()
    except (PerdureError, TypeError, ValueError):
        return type(data).__name__


def _config(value: Any) -> Any:
    """The config of an object of Keras, or the name of an object that has none."""
    try:
        config = keras.saving.serialize_keras_object(value)
        json.dumps(config)
    except Exception:  # noqa: BLE001 (objects of the user's: whatever their get_config raises)
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _comparable(config)


def _environment() -> dict[str, Any]:
    """Settings that can change bits. Nothing is pinned, because the backend has started by then."""
    torch: Any = sys.modules.get("torch")
    read = {
        "jax": present_jax_settings,
        "tensorflow": tensorflow_settings,
        "torch": lambda: torch_settings(torch.device(torch_device())),
    }.get(keras.backend.backend())
    return {"keras": keras.__version__, **({} if read is None else read())}


def _comparable(config: Any) -> Any:
    """Without the location of the code, and with hashes in place of long texts (bytecode)."""
    if isinstance(config, dict):
        return {
            key: _comparable(value)
            for key, value in config.items()
            if key not in ("module", "registered_name", "build_config", "compile_config")
        }
    if isinstance(config, (list, tuple)):
        return [_comparable(item) for item in config]
    if isinstance(config, str) and len(config) > 200:
        return blake3.blake3(config.encode()).hexdigest(16)
    return config


def _renumbered(value: Any, names: dict[str, str], count: Counter[str]) -> Any:
    """With texts like `dense_7` numbered by their first use: Keras numbers all names of a process."""
    if isinstance(value, dict):
        # A key is no name, unless a layer has it.
        return {names.get(k, k): _renumbered(child, names, count) for k, child in value.items()}
    if isinstance(value, list):
        return [_renumbered(child, names, count) for child in value]
    if not isinstance(value, str):
        return value
    if value not in names:
        stem = re.sub(r"_\d+$", "", value)
        names[value] = f"{stem}_{count[stem]}" if count[stem] else stem
        count[stem] += 1
    return names[value]


def _flat(value: Any, path: str = "") -> Description:
    if isinstance(value, Mapping) and value:
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        children = [(str(number), child) for number, child in enumerate(value)]
    else:
        return {path: value if isinstance(value, (bool, int, float, str)) else str(value)}
    fields: Description = {}
    for key, child in children:
        fields |= _flat(child, f"{path}.{key}" if path else key)
    return fields
