"""Errors that a program puts into one step of its own, one bit or one number at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

REPLICA = 5
"""The logical replica that an error of one replica is put into."""


def flipped(value: Any) -> Any:
    """A copy of an array of float32 with one bit of its last element changed."""
    array = np.array(value)
    array.reshape(-1).view(np.uint32)[-1] ^= 1 << 12
    if type(value).__module__.startswith("torch"):
        import torch

        return torch.from_numpy(array)
    if isinstance(value, np.ndarray):
        return array
    import jax

    return jax.device_put(array, value.sharding)


def flip_in(tree: Any, *path: str) -> Any:
    """A copy of a tree of dicts with one bit of the leaf at `path` changed."""
    if not path:
        return flipped(tree)
    return {**tree, path[0]: flip_in(tree[path[0]], *path[1:])}


class Plant:
    """The error `kind` in the step `at`; no error without a kind.

    Those of one replica, of a sum and of the update are put into the verbs of the strategy's engine.
    """

    KINDS = (
        "between", "batch", "position", "key", "contribution", "sum", "update", "after",
    )  # fmt: skip

    def __init__(self, kind: str, at: int, strategy: Any) -> None:
        self._kind, self._at, self._now = kind, at, 0
        self._added = False
        if kind not in ("", *self.KINDS):
            raise ValueError(kind)
        if kind in ("key", "contribution", "sum", "update"):
            self._into(strategy.engine)

    def begin(self, step: int) -> None:
        """The program begins the step after which it has made `step` steps."""
        self._now = step

    def _is_due(self, kind: str) -> bool:
        return kind == self._kind and self._now == self._at

    def before(self, state: Any) -> Any:
        """The state that the step begins with."""
        return flip_in(state, "w", "a") if self._is_due("between") else state

    def after(self, state: Any) -> Any:
        """The state that is saved."""
        return flip_in(state, "w", "b") if self._is_due("after") else state

    def position(self, step: int) -> int:
        """The step whose batch is taken."""
        return 0 if self._is_due("position") else step

    def batch(self, batch: Any) -> Any:
        """The batch that is trained on."""
        if not self._is_due("batch"):
            return batch
        shares = [
            flip_in(share, "x") if replica == REPLICA else share
            for share, replica in zip(batch.values, batch.replicas, strict=True)
        ]
        return replace(batch, values=tuple(shares))

    def _into(self, engine: Any) -> None:
        grad, key, add, update = engine.grad, engine.key, engine.add, engine.update

        def other(stream: Any) -> Any:
            is_due = self._is_due("key") and stream.replica == REPLICA
            return stream._replace(seed=stream.seed ^ 1) if is_due else stream

        def planted_grad(fn: Any, state: Any, share: Any, stream: Any) -> Any:
            value = grad(fn, state, share, other(stream))
            if not self._is_due("contribution") or stream.replica != REPLICA:
                return value
            if "contributions" in value:  # of PyTorch's engine
                return {**value, "contributions": flip_in(value["contributions"], "grads", "b")}
            return flip_in(value, "grads", "b")

        def planted_add(left: Any, right: Any) -> Any:
            total = add(left, right)
            if not self._is_due("sum") or self._added:
                return total
            self._added = True
            if "contributions" in total:
                return {**total, "contributions": flip_in(total["contributions"], "grads", "a")}
            return flip_in(total, "grads", "a")

        def planted_update(fn: Any, state: Any, total: Any, stream: Any) -> Any:
            new, logs = update(fn, state, total, stream)
            return (flip_in(new, "speed", "b") if self._is_due("update") else new), logs

        engine.key = lambda stream: key(other(stream))
        engine.grad, engine.add, engine.update = planted_grad, planted_add, planted_update
        engine.fused_step = lambda *arguments: None
