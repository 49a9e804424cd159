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
from perdure.keras import fit_inputs
from perdure.keras.fit_internals import RunningFit, compiled_metrics, torch_device
from perdure.state.environment import of_jax_as_it_is, of_tensorflow, of_torch
from perdure.state.keras_state import variables_by_path

Description = dict[str, bool | int | float | str]

# Not `epochs`: the bits at a step do not depend on it, so a resumed fit may train for longer.
_OF_FIT = ("batch_size", "initial_epoch", "shuffle", "steps_per_epoch")
_OF_FIT += ("validation_batch_size", "validation_freq", "validation_split", "validation_steps")
# Learning rates change while an optimizer is used. By optimizer: its config when `fit` first saw it.
_first_configs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def describe(fit: RunningFit, callbacks: Mapping[str, Any]) -> Description:
    """Fields by a dotted path, such as `fit.batch_size` and `model.layers.2.config.units`."""
    model, arguments = fit.model, fit.arguments
    optimizer, metrics = model.optimizer, compiled_metrics(model)
    if optimizer is not None and optimizer not in _first_configs:
        _first_configs[optimizer] = _config(optimizer)
    fields: dict[str, Any] = {
        "keras.backend": keras.backend.backend(),
        "keras.dtype": keras.config.dtype_policy().name,
        "environment": _environment(),
        "compile": {
            "optimizer": _first_configs.get(optimizer),
            "loss": _config(getattr(model, "loss", None)),
            "metrics": [] if metrics is None else [_config(metrics)],
            "steps_per_execution": model.steps_per_execution,
            "run_eagerly": model.run_eagerly,
            "jit_compile": bool(model.jit_compile),
        },
        "fit": {
            **{name: arguments.get(name) for name in _OF_FIT},
            "class_weight": _config(arguments.get("class_weight")),
            "callbacks": dict(callbacks),
        },
        "data": fit_inputs.describe(fit.iterator.data),
        "validation_data": _content(arguments.get("validation_data")),
        "model": _config(model),
    }
    variables = {
        f"variables.{path}": f"{variable.dtype} {tuple(variable.shape)}"
        for path, variable in variables_by_path(model).items()
    }
    return _flat(_renumbered(fields)) | variables


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
        "jax": of_jax_as_it_is,
        "tensorflow": of_tensorflow,
        "torch": lambda: of_torch(torch.device(torch_device())),
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


def _renumbered(fields: dict[str, Any]) -> dict[str, Any]:
    """With names numbered by their first use here: Keras numbers all names of a process."""
    new_names: dict[str, str] = {}
    count: Counter[str] = Counter()

    def new_name(match: re.Match[str]) -> str:
        name = match[0]
        if name not in new_names:
            stem = match[1]
            new_names[name] = f"{stem}_{count[stem]}" if count[stem] else stem
            count[stem] += 1
        return new_names[name]

    stems = _automatic_names(fields)
    if not stems:
        return fields
    pattern = rf"\b({'|'.join(sorted(map(re.escape, stems), key=len, reverse=True))})(?:_\d+)?\b"
    text = json.dumps({key: fields[key] for key in ("compile", "model")}, default=str)
    return {**fields, **json.loads(re.sub(pattern, new_name, text))}


def _automatic_names(fields: Any) -> set[str]:
    """Names that Keras made from the name of a class, without their numbers."""
    stems: set[str] = set()
    if isinstance(fields, dict):
        kind, config = fields.get("class_name"), fields.get("config")
        name = config.get("name") if isinstance(config, dict) else None
        if isinstance(kind, str) and isinstance(name, str):
            stem = re.sub(r"_\d+$", "", name)
            if stem.replace("_", "") == kind.lower():
                stems.add(stem)
        for value in fields.values():
            stems |= _automatic_names(value)
    elif isinstance(fields, list):
        for value in fields:
            stems |= _automatic_names(value)
    return stems


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
