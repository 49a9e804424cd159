"""The verbs that a framework supplies to the strategies.

Owns the seam between the tree, which is ours, and the arithmetic, which is the framework's.
Invariant: every floating-point operation of a step happens in `grad`, `add` or `update`, each one a
program of its own that does not know the topology; all other verbs move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from perdure.checkpoint.processes import Processes

Scalar = str | int | float | bool

# grad(state, batch, key) -> contributions; update(state, total) -> (state, logs)
Grad = Callable[[Any, Any, Any], Any]
Update = Callable[[Any, Any], tuple[Any, Any]]


class Stream(NamedTuple):
    """What every random number is a function of."""

    seed: int
    step: int
    replica: int


class Engine(Protocol):
    """One framework, on the local devices of one process.

    A *value* is a tree of arrays on one device. Values and states are opaque to the caller.
    """

    @property
    def processes(self) -> Processes:
        """The group that this process belongs to."""
        ...

    @property
    def devices(self) -> Sequence[Any]:
        """The local devices that are used, in the order in which they take replicas."""
        ...

    @property
    def devices_per_process(self) -> tuple[int, ...]:
        """How many devices every process uses."""
        ...

    def recipe(self) -> dict[str, Scalar]:
        """What of the framework and its settings decides the bits; nothing about topology."""
        ...

    def place(self, state: Any) -> list[Any]:
        """The user's state as one value per local device; no copy of what is there already."""
        ...

    def collect(self, values: list[Any]) -> Any:
        """The inverse: what the user holds, an ordinary object of the framework."""
        ...

    def put(self, value: Any, device: Any) -> Any:
        """The same bytes on a device."""
        ...

    def grad(self, fn: Grad, state: Any, share: Any, stream: Stream) -> Any:
        """Contributions of one logical replica, on the device of `state`."""
        ...

    def add(self, left: Any, right: Any) -> Any:
        """left + right, leaf by leaf. Neither may be used afterwards."""
        ...

    def update(self, fn: Update, state: Any, total: Any, stream: Stream) -> tuple[Any, Any]:
        """(new state, logs), on the device of `state`. `stream.replica` is the number of replicas."""
        ...

    def exchange(self, roots: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
        """The partial sums of every process, on the first local device. Only bytes move.

        `counts` is the number of them in every process; `roots` are this process's own.
        """
        ...

    def call(
        self, fn: Callable[..., Any], device: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """fn(*args, **kwargs), eagerly, with the arrays on `device`."""
        ...

    def key(self, stream: Stream) -> Any:
        """What the framework takes as a source of random numbers."""
        ...

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        """`fn` of every leaf as an array, in the same structure."""
        ...

    def signature(self, value: Any) -> Hashable:
        """Structure, dtypes and shapes; equal for values that can be added."""
        ...

    def describe(self, value: Any) -> dict[str, str]:
        """dtype and shape of every leaf, by path."""
        ...
