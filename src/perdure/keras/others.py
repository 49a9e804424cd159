"""What the other callbacks of a `fit` know: the attributes that changed since training began.

A callback with `state_dict` and `load_state_dict` says it itself. Of any other one, every attribute
with a plain value counts that has become another one since the begin; so settings and paths, which do
not change, stay those of the program.
"""

from __future__ import annotations

from collections import Counter
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

from perdure.keras import plain
from perdure.keras.sources import is_stateful

_NOT_STATE = frozenset({"_model", "params", "model"})
# Of Keras's own, those that change what is trained: their settings belong to the recipe.
_DECIDING = (EarlyStopping, LearningRateScheduler, ReduceLROnPlateau, SwapEMAWeights)


class Others:
    """The other callbacks, by a name; made when all of them have begun."""

    def __init__(self, callbacks: list[Any], own: tuple[Any, ...]) -> None:
        self._named: dict[str, Any] = {}
        count: Counter[str] = Counter()
        for each in callbacks:
            if not isinstance(each, ProgbarLogger) and each not in own:
                kind = type(each).__name__
                count[kind] += 1
                self._named[kind if count[kind] == 1 else f"{kind}_{count[kind]}"] = each
        self._before = {
            name: {} if is_stateful(each) else _packed(each) for name, each in self._named.items()
        }

    def state(self) -> dict[str, Any]:
        """Plain values by callback; those that have nothing to remember are left out."""
        found = {}
        for name, each in self._named.items():
            if is_stateful(each):
                found[name] = {"own": each.state_dict()}
            elif changed := self._changed(name, each):
                found[name] = {"changed": changed, "operator": _has_operator(each)}
        return found

    def restore(self, found: dict[str, Any]) -> None:
        """Give the callbacks back what they knew."""
        for name, state in found.items():
            if (each := self._named.get(name)) is None:
                continue
            if "own" in state:
                each.load_state_dict(state["own"])
                continue
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

    def _changed(self, name: str, each: Any) -> dict[str, Any]:
        before = self._before[name]
        return {
            attribute: plain.unpack(packed)
            for attribute, packed in _packed(each).items()
            if attribute not in before or not plain.same(packed, before[attribute])
        }


def _packed(callback: Callback) -> dict[str, Any]:
    values = {n: v for n, v in vars(callback).items() if n not in _NOT_STATE}
    return {name: plain.pack(value) for name, value in values.items() if plain.is_plain(value)}


def _has_operator(callback: Any) -> bool:
    return isinstance(callback, MonitorCallback) and callback.monitor_op is not None
