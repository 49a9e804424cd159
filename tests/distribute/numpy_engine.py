"""An engine on NumPy in a few lines: a strategy needs nothing but the members of `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from perdure.distribute import SingleProcess, pytree
from perdure.distribute.engine import EagerRun, Scalar, Stream, describe, in_turns


class NumpyTrees:
    def flatten(self, value: Any) -> tuple[list[Any], Hashable]:
        leaves, structure = pytree.leaves_and_structure(value)
        return [np.asarray(leaf) for leaf in leaves], structure

    def paths(self, value: Any) -> list[str]:
        return [path for path, _ in pytree.flatten(value)]

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        return pytree.rebuild(value, map(fn, map(np.asarray, pytree.leaves(value))))


class NumpyEagerRun(EagerRun):
    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self._calls = calls

    def call(
        self, fn: Callable[..., Any], device: Any, args: Any, kwargs: Any, stream: Any = None
    ) -> Any:
        self._calls.append(("call", stream))
        return fn(*args, **kwargs)


class NumpyEngine:
    def __init__(self, devices: int) -> None:
        self.processes = SingleProcess()
        self.trees = NumpyTrees()
        self.devices = tuple(range(devices))
        self.devices_per_process = (devices,)
        self.calls: list[tuple[str, Any]] = []

    def recipe(self) -> dict[str, Scalar]:
        return {"engine": "numpy"}

    def place(self, state: Any) -> list[Any]:
        return [state] * len(self.devices)

    def replicate(self, values: list[Any]) -> Any:
        first = describe(self.trees, values[0])
        assert all(describe(self.trees, value) == first for value in values)
        return values[0]

    def put(self, value: Any, device: Any) -> Any:
        return value

    def grad(self, fn: Any, state: Any, share: Any, stream: Stream) -> Any:
        self.calls.append(("grad", stream))
        return fn(state, share, self.key(stream))

    def add(self, left: Any, right: Any) -> Any:
        self.calls.append(("add", None))
        pairs = zip(pytree.flatten(left), pytree.flatten(right), strict=True)
        return pytree.rebuild(left, iter([a + b for (_, a), (_, b) in pairs]))

    def update(self, fn: Any, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        self.calls.append(("update", stream))
        return fn(state, total)

    def runner(self) -> Any:
        return lambda work, states: in_turns(work, states, len(self.devices))

    def fused_step(self, grad: Any, update: Any, replicas: int, seed: int) -> str:
        return "this engine calls grad for each replica and adds one by one"

    def exchange(self, roots: list[Any], counts: tuple[int, ...], merge: Any = None) -> Any:
        raise AssertionError("a group of one has nobody to exchange with")

    def eager_run(self, sum_over_replicas: Any) -> EagerRun:
        return NumpyEagerRun(self.calls)

    def key(self, stream: Stream) -> Any:
        return np.random.default_rng(stream)
