"""What was asked of `compile` and `fit`, field by field, to tell what changed since a backup."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import blake3
import keras
import numpy as np
from keras.src import tree

from perdure.data.sources import ArraySource
from perdure.errors import PerdureError
from perdure.keras import fit_inputs
from perdure.keras.fit_environment import environment
from perdure.keras.fit_internals import RunningFit
from perdure.state.keras_state import variables_by_path

Description = dict[str, bool | int | float | str]

# Not `epochs`: the bits at a step do not depend on it, so a resumed fit may train for longer.
_OF_FIT = ("batch_size", "initial_epoch", "shuffle", "steps_per_epoch")
_OF_FIT += ("validation_batch_size", "validation_freq", "validation_split", "validation_steps")
# Learning rates change while an optimizer is used; this is what it had when `fit` first saw it.
_seen: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def describe(fit: RunningFit, callbacks: Mapping[str, Any]) -> Description:
    """Fields by a dotted path, such as `fit.batch_size` and `model.layers.2.config.units`."""
    model, arguments = fit.model, fit.arguments
    optimizer = model.optimizer
    if optimizer is not None and optimizer not in _seen:
        _seen[optimizer] = _config(optimizer)
    found: dict[str, Any] = {
        "keras.backend": keras.backend.backend(),
        "keras.dtype": keras.config.dtype_policy().name,
        "environment": environment(),
        "compile": {
            "optimizer": _seen.get(optimizer),
            "loss": _config(getattr(model, "loss", None)),
            "metrics": [_config(each) for each in _metrics(model)],
            "steps_per_execution": model.steps_per_execution,
            "run_eagerly": model.run_eagerly,
            "jit_compile": bool(model.jit_compile),
        },
        "fit": {
            **{name: arguments.get(name) for name in _OF_FIT},
            "class_weight": _config(arguments.get("class_weight")),
            "callbacks": dict(callbacks),
        },
        "data": fit_inputs.describe(fit.iterator.data_adapter),
        "validation_data": _content(arguments.get("validation_data")),
        "model": _config(model),
    }
    variables = {
        f"variables.{path}": f"{each.dtype} {tuple(each.shape)}"
        for path, each in variables_by_path(model).items()
    }
    return _flat(_renumbered(found)) | variables


def _metrics(model: Any) -> list[Any]:
    return [each for each in (getattr(model, "_compile_metrics", None),) if each is not None]


def _content(data: Any) -> Any:
    """Arrays by their bits, other data by what they are."""
    if data is None:
        return None
    leaves = [each for each in tree.flatten(data) if each is not None]
    # NumPy takes anything with a length and indices for a sequence: it would read a whole PyDataset.
    if not all(hasattr(each, "__array__") or isinstance(each, (int, float)) for each in leaves):
        return type(data).__name__
    try:
        return ArraySource(tuple(np.asarray(each) for each in leaves)).fingerprint()
    except (PerdureError, TypeError, ValueError):
        return type(data).__name__


def _config(value: Any) -> Any:
    """What Keras writes of an object where it can, its name where it cannot."""
    try:
        made = keras.saving.serialize_keras_object(value)
        json.dumps(made)
    except Exception:  # noqa: BLE001 (objects of the user's: whatever their get_config raises)
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _without(made)


def _without(made: Any) -> Any:
    """Without what follows from where the code lies, and without long texts."""
    if isinstance(made, dict):
        # A Python lambda is told by its bytecode, which is long and no one's to read.
        return {
            key: _without(value)
            for key, value in made.items()
            if key not in ("module", "registered_name", "build_config", "compile_config")
        }
    if isinstance(made, (list, tuple)):
        return [_without(each) for each in made]
    if isinstance(made, str) and len(made) > 200:
        return blake3.blake3(made.encode()).hexdigest(16)
    return made


def _renumbered(found: dict[str, Any]) -> dict[str, Any]:
    """With names numbered by their first use here: Keras numbers those of a whole process."""
    given: dict[str, str] = {}
    count: Counter[str] = Counter()

    def fresh(match: re.Match[str]) -> str:
        name = match[0]
        if name not in given:
            stem = match[1]
            given[name] = f"{stem}_{count[stem]}" if count[stem] else stem
            count[stem] += 1
        return given[name]

    stems = _automatic(found)
    if not stems:
        return found
    pattern = rf"\b({'|'.join(sorted(map(re.escape, stems), key=len, reverse=True))})(?:_\d+)?\b"
    text = json.dumps({key: found[key] for key in ("compile", "model")}, default=str)
    return {**found, **json.loads(re.sub(pattern, fresh, text))}


def _automatic(found: Any) -> set[str]:
    """Names that Keras gave: those that are the class's own, numbered or not."""
    stems: set[str] = set()
    if isinstance(found, dict):
        kind, config = found.get("class_name"), found.get("config")
        name = config.get("name") if isinstance(config, dict) else None
        if isinstance(kind, str) and isinstance(name, str):
            stem = re.sub(r"_\d+$", "", name)
            if stem.replace("_", "") == kind.lower():
                stems.add(stem)
        for each in found.values():
            stems |= _automatic(each)
    elif isinstance(found, list):
        for each in found:
            stems |= _automatic(each)
    return stems


def _flat(value: Any, path: str = "") -> Description:
    if isinstance(value, Mapping) and value:
        parts = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        parts = [(str(number), each) for number, each in enumerate(value)]
    else:
        return {path: value if isinstance(value, (bool, int, float, str)) else str(value)}
    found: Description = {}
    for key, each in parts:
        found |= _flat(each, f"{path}.{key}" if path else key)
    return found
