"""The state of the other callbacks of a `fit`: the attributes that changed since training began.

A callback with `state_dict` defines its own. Of others every plain value that has changed is saved;
a warning names those that are not plain. They are packed into one text and arrays, because they
grow and have no template.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter, deque
from typing import Any

import numpy as np
from keras.callbacks import (
    EarlyStopping,
    LearningRateScheduler,
    ProgbarLogger,
    ReduceLROnPlateau,
    SwapEMAWeights,
)

from perdure.errors import TrainError
from perdure.keras.fit_internals import CALLBACK_ATTRIBUTES, has_direction, set_direction
from perdure.state import bits

# Keras's callbacks that change what is trained: their settings belong to the recipe.
_IN_RECIPE = (EarlyStopping, LearningRateScheduler, ReduceLROnPlateau, SwapEMAWeights)

_TAG = "perdure"
_CONTAINERS = (bytearray, deque, dict, frozenset, list, set, tuple)


class CallbackState:
    """The callbacks of a `fit` except `excluded`. Made after `on_train_begin` of all of them."""

    def __init__(self, callbacks: list[Any], excluded: tuple[Any, ...]) -> None:
        self._named: dict[str, Any] = {}
        self._warned = False
        count: Counter[str] = Counter()
        for callback in callbacks:
            if not isinstance(callback, ProgbarLogger) and callback not in excluded:
                kind = type(callback).__name__
                count[kind] += 1
                self._named[kind if count[kind] == 1 else f"{kind}_{count[kind]}"] = callback
        self._before = {
            name: {} if is_stateful(callback) else _packed(callback)
            for name, callback in self._named.items()
        }
        self._containers_before = {
            name: _containers(callback) for name, callback in self._named.items()
        }

    def state(self) -> dict[str, Any]:
        """Plain values by callback; callbacks that have not changed are left out."""
        states = {}
        for name, callback in self._named.items():
            if is_stateful(callback):
                own = copy_plain(callback.state_dict(), f"{name}.state_dict()")
                states[name] = {"own": own}
            elif changed := self._changed(name, callback):
                states[name] = {"changed": changed, "operator": has_direction(callback)}
        self._warn_of_lost()
        return states

    def restore(self, states: dict[str, Any]) -> None:
        """Restore the callbacks, whatever they have done since training began."""
        for name, callback in self._named.items():
            state = states.get(name, {"operator": False, "changed": {}})
            if is_stateful(callback):
                if "own" in state:
                    callback.load_state_dict(state["own"])
                continue
            if "own" in state:
                continue
            # Unchanged attributes are not stored, and may have changed when the epoch began again.
            for attribute, packed in self._before[name].items():
                value = vars(callback).get(attribute)
                if not is_plain(value) or not bits.same(pack(value), packed):
                    setattr(callback, attribute, unpack(packed))
            if state["operator"] and not has_direction(callback):
                set_direction(callback)
            for attribute, value in state["changed"].items():
                setattr(callback, attribute, value)

    def describe(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, callback in self._named.items():
            if isinstance(callback, _IN_RECIPE):
                for setting, value in sorted(_attributes(callback).items()):
                    if setting == "min_delta":
                        value = abs(value)  # Keras changes its sign at the first epoch
                    if isinstance(value, (bool, int, float, str)):
                        fields[f"{name}.{setting.lstrip('_')}"] = value
        return fields

    def _warn_of_lost(self) -> None:
        lost = [
            f"{name}.{attribute} ({type(getattr(callback, attribute)).__name__})"
            for name, callback in self._named.items()
            for attribute, items in _containers(callback).items()
            if not _same_objects(items, self._containers_before[name].get(attribute))
        ]
        if lost and not self._warned:
            self._warned = True
            warnings.warn(
                f"BackupAndRestore: not in the backup, because they are no plain values: "
                f"{', '.join(lost)}. Give the callback `state_dict` and `load_state_dict`.",
                stacklevel=6,
            )

    def _changed(self, name: str, callback: Any) -> dict[str, Any]:
        before = self._before[name]
        return {
            attribute: unpack(packed)
            for attribute, packed in _packed(callback).items()
            if attribute not in before or not bits.same(packed, before[attribute])
        }


def _attributes(callback: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(callback).items() if n not in CALLBACK_ATTRIBUTES}


def _packed(callback: Any) -> dict[str, Any]:
    values = _attributes(callback)
    return {name: pack(value) for name, value in values.items() if is_plain(value)}


def _containers(callback: Any) -> dict[str, list[Any]]:
    """The items of containers that are not plain. Keras's callbacks keep caches and files in such."""
    if is_stateful(callback) or type(callback).__module__.startswith("keras."):
        return {}
    return {
        name: [*value.items()] if isinstance(value, dict) else [*value]
        for name, value in _attributes(callback).items()
        if isinstance(value, _CONTAINERS) and not is_plain(value)
    }


def _same_objects(items: list[Any], before: list[Any] | None) -> bool:
    return before is not None and [*map(_identity, items)] == [*map(_identity, before)]


def _identity(item: Any) -> Any:
    return (id(item[0]), id(item[1])) if type(item) is tuple and len(item) == 2 else id(item)


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def pack(value: Any) -> dict[str, Any]:
    """Pack a plain value as `{"json": uint8 text, "arrays": {"0": ...}}`, or raise TypeError."""
    arrays: dict[str, Any] = {}
    text = json.dumps(_encode(value, arrays), separators=(",", ":"))
    packed: dict[str, Any] = {"json": np.frombuffer(text.encode(), np.uint8)}
    return packed | ({"arrays": arrays} if arrays else {})


def unpack(packed: dict[str, Any]) -> Any:
    text = bytes(np.asarray(packed["json"])).decode()
    return _decode(json.loads(text), packed.get("arrays", {}))


def is_plain(value: Any) -> bool:
    try:
        _encode(value, {})
    except TypeError:
        return False
    return True


def copy_plain(value: Any, what: str) -> Any:
    """A copy of a plain value. Raises `TrainError`, which begins with `what`, if it is not plain."""
    try:
        return unpack(pack(value))
    except TypeError as error:
        raise TrainError(
            f"{what}: expected numbers, strings, arrays, and lists, tuples and dicts (with strings as "
            f"keys) of them, found a value of type {error}, which a backup cannot hold."
        ) from None


def _encode(value: Any, arrays: dict[str, Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses are other types (np.float64 is a float).
        if type(value) in (type(None), bool, int, float, str):
            return value
        if not isinstance(value, np.generic):
            raise TypeError(type(value).__name__)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.array(value)  # a copy, because the original may change in place
        if array.dtype.kind not in "biufc" and array.dtype.num < 256:
            raise TypeError(str(array.dtype))
        name = str(len(arrays))
        arrays[name] = array
        return {_TAG: "scalar" if isinstance(value, np.generic) else "array", "at": name}
    if isinstance(value, list):
        return [_encode(item, arrays) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "of": [_encode(item, arrays) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, arrays) for key, item in value.items()}
    raise TypeError(type(value).__name__)


def _decode(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case "array":
            return np.array(arrays[value["at"]])
        case "scalar":
            return np.asarray(arrays[value["at"]])[()]
        case "tuple":
            return tuple(_decode(item, arrays) for item in value["of"])
    return {key: _decode(item, arrays) for key, item in value.items()}
