"""Ready-made hooks for a `Trainer`: early stopping, and a learning rate that follows a metric.

A hook that has `state_dict` and `load_state_dict` is part of the checkpoint, under `hooks/NAME`, so
that a resume restores it. Its state must always have the same structure: infinity or NaN for "nothing
yet", not None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from perdure.checkpoint.arguments import integer, require_choice, require_number
from perdure.errors import TrainError
from perdure.state import flatten, restore
from perdure.state.leaf_values import array_leaf, plain_value, scalar_leaf
from perdure.store import Leaf
from perdure.train.summaries import scalars
from perdure.train.trainer import Hook, Trainer


class _Monitor(Hook):
    def __init__(
        self,
        monitor: str = "loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        every: int | None = None,
    ) -> None:
        require_choice("mode", mode, ("min", "max"))
        self._patience = integer("patience", patience)
        self._every = integer("every", every, optional=True)
        self._monitor = monitor
        self._min_delta = min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.best = float("inf") * self._sign
        self.wait = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.wait = state["best"], state["wait"]

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        if self._every is not None and trainer.due(self._every):
            self._judge(trainer, scalars(logs))

    def after_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self._every is None:
            self._judge(trainer, metrics)

    def patience_over(self, trainer: Trainer) -> None:
        raise NotImplementedError

    def _judge(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self._monitor not in metrics:
            raise TrainError(
                f"{type(self).__name__}: expected the metric {self._monitor!r} at step "
                f"{trainer.step}, found {', '.join(map(repr, sorted(metrics))) or 'none'}."
            )
        value = metrics[self._monitor]
        # NaN and the infinities are never better: a run that diverges runs out of patience.
        if math.isfinite(value) and self._sign * value < self._sign * self.best - self._min_delta:
            self.best, self.wait = value, 0
            return
        self.wait += 1
        if self.wait >= self._patience:
            self.patience_over(trainer)


class EarlyStopping(_Monitor):
    """Ends training when a metric has stopped improving.

    Args:
        monitor: Name of the metric.
        patience: How often in a row the metric may fail to improve.
        min_delta: How much better than the best value counts as an improvement.
        mode: Whether lower ("min") or higher ("max") is better.
        every: Look at the logs of a step after every so many steps. None: at each evaluation.
    """

    def begin(self, trainer: Trainer) -> None:
        if self.wait >= self._patience:
            self.patience_over(trainer)

    def patience_over(self, trainer: Trainer) -> None:
        trainer.request_stop(f"{self._monitor} has not improved {self.wait} times in a row")


class ReduceLROnPlateau(_Monitor):
    """Multiplies learning rates in the state by a factor when a metric has stopped improving.

    The product is computed in float64 and rounded to the dtype of the leaf.

    Args:
        leaf: Path of the learning rate in the state, as `perdure show` prints it; `*` matches anything.
            `opt/hyperparams/learning_rate` of optax's `inject_hyperparams`,
            `optimizer/param_groups/*/lr` of PyTorch.
        monitor: Name of the metric.
        factor: Between 0 and 1.

    The other arguments are those of `EarlyStopping`.
    """

    def __init__(
        self,
        leaf: str,
        monitor: str = "loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        every: int | None = None,
    ) -> None:
        super().__init__(monitor, patience=patience, min_delta=min_delta, mode=mode, every=every)
        expected = "more than 0 and less than 1"
        require_number("factor", factor, lambda part: 0 < part < 1, expected)
        self._leaf = leaf
        self._factor = factor

    def begin(self, trainer: Trainer) -> None:
        self._paths(trainer)  # a wrong path is an error now, not after hours

    def patience_over(self, trainer: Trainer) -> None:
        self.wait = 0
        leaves = flatten(trainer.state)
        for path in self._paths(trainer):
            value = plain_value(leaves[path])
            smaller = float(value) * self._factor
            is_float = isinstance(value, float)
            new_leaf = (
                scalar_leaf(smaller) if is_float else array_leaf(np.asarray(smaller, value.dtype))
            )
            # The dtype of before: the leaf may be a weakly typed array of JAX.
            leaves[path] = Leaf(leaves[path].dtype, (), new_leaf.data, frozen=True)
        trainer.state = restore(trainer.state, leaves)

    def _paths(self, trainer: Trainer) -> list[str]:
        leaves = flatten(trainer.state)
        rates = [
            path
            for path, leaf in leaves.items()
            if leaf.shape == () and leaf.strong().dtype.startswith(("py:float", "float", "bfloat"))
        ]
        paths = [path for path in rates if fnmatchcase(path, self._leaf)]
        if not paths:
            raise TrainError(
                f"ReduceLROnPlateau: expected a leaf {self._leaf!r} in the state, a float; found "
                f"{', '.join(rates[:10]) or 'none'}. Keep the learning rate in the state."
            )
        return paths
