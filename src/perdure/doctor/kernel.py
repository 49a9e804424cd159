"""`Kernel`: a small computation whose bits may depend on order, thread, device or process.

Inputs are made by NumPy from a fixed seed, so that every framework, device and process has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

Inputs = Callable[[np.random.Generator], tuple[Any, ...]]

AS_IT_IS, DETERMINISTIC, ONE_THREAD = "as it is", "deterministic", "one thread"
"""The conditions of a process: the environment unchanged; what a strategy of perdure sets; as it is,
with one thread."""


class Refused(Exception):
    """The framework has no deterministic form of this computation, and says so."""


class Kernel(NamedTuple):
    """A computation and its arguments.

    Attributes:
        compute: Of the placed inputs; returns a dictionary of arrays.
        inputs: Makes the arguments as NumPy arrays.
        dtypes: What the float inputs are converted to, one after the other.
    """

    compute: Callable[..., Any]
    inputs: Inputs
    dtypes: tuple[str, ...] = ("float32",)


class Framework(Protocol):
    """What a module such as `perdure.doctor.torch_kernels` offers to the check of its kernels."""

    KERNELS: Mapping[str, Kernel]

    def prepare(self, condition: str) -> None:
        """Bring this process into the condition. Called once, before anything is computed."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Versions and settings of the framework that can change bits, for people."""
        ...

    def devices(self) -> Mapping[str, tuple[str, Any]]:
        """The local devices by name: their kind, and the device. Only equal kinds are compared."""
        ...

    def place(self, array: Any, dtype: str, device: Any) -> Any:
        """A NumPy array on a device; floats are converted to `dtype`."""
        ...

    def program(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """What is called with the placed inputs. Raises `Refused` as it is made or called."""
        ...


def listed(devices: Mapping[str, tuple[str, Any]]) -> str:
    """The devices for people: `cuda:0 (NVIDIA H100), cpu`."""
    return ", ".join(
        name if kind == name else f"{name} ({kind})" for name, (kind, _) in devices.items()
    )


def _floats(*shapes: tuple[int, ...]) -> Inputs:
    return lambda random: tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def _wide(length: int) -> Inputs:
    """Numbers of many magnitudes: every order of their additions gives other bits."""

    def make(random: np.random.Generator) -> tuple[Any, ...]:
        values = random.normal(size=length) * np.exp(random.uniform(-8, 8, size=length))
        return (values.astype(np.float32),)

    return make


def _rows_to_places(rows: int, places: int, width: int) -> Inputs:
    def make(random: np.random.Generator) -> tuple[Any, ...]:
        values = random.normal(size=(rows, width)).astype(np.float32)
        start = random.normal(size=(places, width)).astype(np.float32)
        return start, random.integers(0, places, size=rows).astype(np.int32), values

    return make


def _ties(length: int) -> Inputs:
    return lambda random: (random.integers(0, 16, size=length).astype(np.float32),)


_BOTH = ("float32", "bfloat16")

INPUTS: dict[str, tuple[Inputs, tuple[str, ...]]] = {
    "matmul": (_floats((127, 513), (513, 255)), _BOTH),
    "matmul of one row": (_floats((1, 1021), (1021, 769)), _BOTH),
    "convolution": (_floats((4, 3, 29, 29), (16, 3, 3, 3)), _BOTH),
    "max pooling": (_ties(4 * 8 * 30 * 30), ("float32",)),
    "sum": (_wide(1_000_003), ("float32",)),
    "cumulative sum": (_wide(100_003), ("float32",)),
    "scatter-add": (_rows_to_places(60_001, 17, 3), ("float32",)),
    "embedding": (_rows_to_places(4_099, 31, 64), _BOTH),
    "attention": (_floats((2, 65, 3, 32), (2, 65, 3, 32), (2, 65, 3, 32)), _BOTH),
    "layer norm": (_floats((257, 129), (129,), (129,)), ("float32",)),
    "sort with ties": (_ties(100_003), ("float32",)),
    "exp, tanh, erf": (_floats((10_007,)), ("float32",)),
}
"""Inputs and dtypes of the kernels, by the name that they have in each framework."""
