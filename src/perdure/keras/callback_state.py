"""What the other callbacks of a `fit` know: the attributes that changed since training began.

A callback with `state_dict` and `load_state_dict` says it itself. Of any other one, every attribute
with a plain value counts that has become another one since the begin; so settings and paths, which do
not change, stay those of the program. A warning names what has changed and is not plain.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from typing import Any

from keras.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateScheduler,
    ProgbarLogger,
    ReduceLROnPlateau,
    SwapEMAWeights,
)
from keras.src.callbacks.monitor_callback import MonitorCallback

from perdure.keras import packing
from perdure.keras.fit_inputs import is_stateful

_NOT_STATE = frozenset({"_model", "params", "model"})
# Of Keras's own, those that change what is trained: their settings belong to the recipe.
_DECIDING = (EarlyStopping, LearningRateScheduler, ReduceLROnPlateau, SwapEMAWeights)

_CONTAINERS = (bytearray, deque, dict, frozenset, list, set, tuple)


class CallbackState:
    """The other callbacks, by a name; made when all of them have begun."""

    def __init__(self, callbacks: list[Any], own: tuple[Any, ...]) -> None:
        self._named: dict[str, Any] = {}
        self._told = False
        count: Counter[str] = Counter()
        for each in callbacks:
            if not isinstance(each, ProgbarLogger) and each not in own:
                kind = type(each).__name__
                count[kind] += 1
                self._named[kind if count[kind] == 1 else f"{kind}_{count[kind]}"] = each
        self._before = {
            name: {} if is_stateful(each) else _packed(each) for name, each in self._named.items()
        }
        self._held = {name: _held(each) for name, each in self._named.items()}

    def state(self) -> dict[str, Any]:
        """Plain values by callback; those that have nothing to remember are left out."""
        found = {}
        for name, each in self._named.items():
            if is_stateful(each):
                found[name] = {"own": each.state_dict()}
            elif changed := self._changed(name, each):
                found[name] = {"changed": changed, "operator": _has_operator(each)}
        self._warn_of_lost()
        return found

    def restore(self, found: dict[str, Any]) -> None:
        """Give the callbacks back what they knew, whatever they have done since they began."""
        for name, each in self._named.items():
            state = found.get(name, {"operator": False, "changed": {}})
            if is_stateful(each):
                if "own" in state:
                    each.load_state_dict(state["own"])
                continue
            if "own" in state:
                continue
            # What was as at the begin is not stored, and may have changed as the epoch began again.
            for attribute, packed in self._before[name].items():
                now = vars(each).get(attribute)
                if not packing.is_plain(now) or not packing.same(packing.pack(now), packed):
                    setattr(each, attribute, packing.unpack(packed))
            if state["operator"] and not _has_operator(each):
                each._set_monitor_op()  # which turns the sign of min_delta, once
            for attribute, value in state["changed"].items():
                setattr(each, attribute, value)

    def describe(self) -> dict[str, Any]:
        """The settings of those that decide the result."""
        found: dict[str, Any] = {}
        for name, each in self._named.items():
            if isinstance(each, _DECIDING):
                settings = {n: v for n, v in vars(each).items() if n not in _NOT_STATE}
                for setting, value in sorted(settings.items()):
                    if setting == "min_delta":
                        value = abs(value)  # Keras turns its sign at the first epoch
                    if isinstance(value, (bool, int, float, str)):
                        found[f"{name}.{setting.lstrip('_')}"] = value
        return found

    def _warn_of_lost(self) -> None:
        """Say once what has changed and is not plain, so that no backup has it."""
        lost = [
            f"{name}.{attribute} ({type(getattr(each, attribute)).__name__})"
            for name, each in self._named.items()
            for attribute, parts in _held(each).items()
            if not _same_parts(parts, self._held[name].get(attribute))
        ]
        if lost and not self._told:
            self._told = True
            warnings.warn(
                f"BackupAndRestore: what callbacks know is not in the backup where it is no plain "
                f"value: {', '.join(lost)}. Give the callback `state_dict` and `load_state_dict`, or "
                f"use lists and dicts of numbers, strings and arrays.",
                stacklevel=6,
            )

    def _changed(self, name: str, each: Any) -> dict[str, Any]:
        before = self._before[name]
        return {
            attribute: packing.unpack(packed)
            for attribute, packed in _packed(each).items()
            if attribute not in before or not packing.same(packed, before[attribute])
        }


def _packed(callback: Callback) -> dict[str, Any]:
    values = {n: v for n, v in vars(callback).items() if n not in _NOT_STATE}
    return {name: packing.pack(value) for name, value in values.items() if packing.is_plain(value)}


def _held(callback: Any) -> dict[str, list[Any]]:
    """The elements of containers that are not plain. Keras's own hold caches there, and files."""
    if is_stateful(callback) or type(callback).__module__.startswith("keras."):
        return {}
    return {
        name: [*value.items()] if isinstance(value, dict) else [*value]
        for name, value in vars(callback).items()
        if name not in _NOT_STATE and isinstance(value, _CONTAINERS) and not packing.is_plain(value)
    }


def _same_parts(parts: list[Any], before: list[Any] | None) -> bool:
    """Whether a container holds the very objects of before; they need not know how to compare."""
    return before is not None and [*map(_identity, parts)] == [*map(_identity, before)]


def _identity(part: Any) -> Any:
    return (id(part[0]), id(part[1])) if type(part) is tuple and len(part) == 2 else id(part)


def _has_operator(callback: Any) -> bool:
    return isinstance(callback, MonitorCallback) and callback.monitor_op is not None
