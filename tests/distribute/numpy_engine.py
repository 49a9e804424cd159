"""An engine of a few lines, on numpy: the seam is all that a strategy needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from perdure.distribute import SingleProcess, pytree
from perdure.distribute.engine import Guard, Scalar, Stream, in_turns


class NumpyEngine:
    def __init__(self, devices: int) -> None:
        self.processes = SingleProcess()
        self.devices = tuple(range(devices))
        self.devices_per_process = (devices,)
        self.calls: list[tuple[str, Any]] = []

    def recipe(self) -> dict[str, Scalar]:
        return {"engine": "numpy"}

    def place(self, state: Any) -> list[Any]:
        return [state] * len(self.devices)

    def collect(self, values: list[Any]) -> Any:
        assert all(self.describe(value) == self.describe(values[0]) for value in values)
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

    def together(self, grad: Any, update: Any, replicas: int, seed: int) -> None:
        return None

    def exchange(self, roots: list[Any], counts: tuple[int, ...], merge: Any = None) -> Any:
        raise AssertionError("a group of one has nobody to exchange with")

    def call(
        self, fn: Callable[..., Any], device: Any, args: Any, kwargs: Any, stream: Any = None
    ) -> Any:
        self.calls.append(("call", stream))
        return fn(*args, **kwargs)

    def guard(self, strategy: Any) -> Guard:
        return Guard()

    def random_state(self) -> Any:
        return ()

    def set_random_state(self, state: Any) -> None:
        return None

    def settings(self) -> Any:
        return contextlib.nullcontext

    def key(self, stream: Stream) -> Any:
        return np.random.default_rng(stream)

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        return pytree.transform(lambda leaf: fn(np.asarray(leaf)), value)

    def stack(self, values: list[Any]) -> Any:
        columns = zip(*(pytree.flatten(value) for value in values), strict=True)
        return pytree.rebuild(values[0], iter([np.stack([x for _, x in c]) for c in columns]))

    def signature(self, value: Any) -> Hashable:
        return pytree.structure(value), tuple(sorted(self.describe(value).items()))

    def describe(self, value: Any) -> dict[str, str]:
        arrays = [(path, np.asarray(leaf)) for path, leaf in pytree.flatten(value)]
        return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in arrays}
