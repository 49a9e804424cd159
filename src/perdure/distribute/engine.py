"""The interface between the strategies and a framework.

Every floating-point operation of a step happens in `grad`, `add` or `update`. Each of them is a program
of its own that does not know the topology. All other verbs move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from perdure.distribute.arrays import namespace
from perdure.runtime.process_group import Processes

Scalar = str | int | float | bool

# grad(state, batch, key) -> contributions; update(state, total) -> (state, logs)
Grad = Callable[[Any, Any, Any], Any]
Update = Callable[[Any, Any], tuple[Any, Any]]

# work(device, state) iterates over the replicas of one local device and yields (replica, contribution).
Work = Callable[[int, Any], Iterator[tuple[int, Any]]]

# The values of every process -> their sum, in the tree. A value may also be a slice of all of them.
Merge = Callable[[list[list[Any]]], Any]

# The values of the local replicas -> the sum of the values of all replicas. A collective.
SumOverReplicas = Callable[[tuple[Any, ...]], Any]

# From this size in bytes of all partial sums of a process, slices are exchanged.
SLICED_FROM = 4 << 20


def sliced(nbytes: int, counts: tuple[int, ...]) -> bool:
    """Whether processes exchange slices of the values to merge; the same in every process.

    With P processes each receives P - 1 times its bytes as whole values and 2 (P - 1) / P times as
    slices, in two rounds: between two processes slices are never better.
    """
    return len(counts) > 2 and nbytes * max(counts) >= SLICED_FROM


class Stream(NamedTuple):
    """Every random number is a function of these three."""

    seed: int
    step: int
    replica: int


# The results of the verbs for a state: (state, logs) of each device.
Reference = Callable[[Any], list[tuple[Any, Any]]]


class FusedStep(Protocol):
    """A whole step, with the bits of the step that is made of the verbs of an engine."""

    def __call__(
        self,
        state: Any,
        shares: Sequence[Any],
        step: int,
        donate: bool | None = False,
        reference: Reference | None = None,
        /,
    ) -> tuple[Any, Any] | None:
        """(state, logs) of a step; None if it does not apply, and the verbs are to be used.

        `donate`: whether the memory of `state` may be used; None only if it is what the last call
        returned. `reference` computes the step by the verbs, where fused steps have not been
        measured; if it was called, `state` may be gone, and what it returned is the result.
        """
        ...

    def explain(self) -> str:
        """Why the last call was, or was not, made of fewer programs; "" before the first."""
        ...

    def forget(self) -> None:
        """Take the next state for one that no call has returned."""
        ...


class Trees(Protocol):
    """How a framework takes a value (a tree of its arrays) apart."""

    def flatten(self, value: Any) -> tuple[list[Any], Hashable]:
        """The leaves in a fixed order, and the structure, which is equal for equal containers."""
        ...

    def paths(self, value: Any) -> list[str]:
        """The path of every leaf, in the order of `flatten`."""
        ...

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        """`fn` of every leaf as an array, in the same containers and the order of `flatten`."""
        ...


def signature(trees: Trees, value: Any) -> Hashable:
    """Structure, dtypes and shapes; equal for values that can be added."""
    leaves, structure = trees.flatten(value)
    return structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


def describe_leaf(leaf: Any) -> str:
    """dtype and shape, such as "float32[3, 4]"; the same text for every framework."""
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def describe(trees: Trees, value: Any) -> dict[str, str]:
    """dtype and shape of every leaf, by path."""
    leaves, _ = trees.flatten(value)
    return dict(zip(trees.paths(value), map(describe_leaf, leaves), strict=True))


def stack(trees: Trees, values: list[Any]) -> Any:
    """One value, whose leaves are the leaves of all values along a new first axis."""
    columns: list[list[Any]] = []
    for value in values:
        leaves: list[Any] = []
        trees.map(leaves.append, value)
        columns.append(leaves)
    rows = zip(*columns, strict=True)
    return trees.map(lambda leaf: namespace(leaf).stack(list(next(rows))), values[0])


class EagerRun:
    """The framework's part in one `strategy.run`. This class is for one without global state."""

    def call(
        self,
        fn: Callable[..., Any],
        device: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> Any:
        """fn(*args, **kwargs), eagerly, on `device`; `stream` decides the global generators."""
        return fn(*args, **kwargs)

    def replica(self, replica: int, arguments: Any) -> AbstractContextManager[None]:
        """Surrounds the function of a replica; `arguments` are arguments that only this replica has."""
        return nullcontext()

    def leave(self, replica: int) -> None:
        """Called in the middle of the function of `replica`, before another replica runs."""

    def resume(self, replica: int) -> None:
        """Called before `replica` continues."""

    def finish(self) -> None:
        """Called when all replicas have succeeded. A collective."""

    def random_state(self) -> Callable[[], None]:
        """Remembers the state of the global generators; the result puts it back."""
        return lambda: None

    def thread_settings(self) -> Callable[[], AbstractContextManager[None]]:
        """Remembers the settings of this thread; the result applies them in another thread."""
        return nullcontext


class Engine(Protocol):
    """One framework, on the local devices of one process.

    A *value* is a tree of arrays on one device.
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

    @property
    def trees(self) -> Trees:
        """How this framework takes values apart; `signature`, `describe` and `stack` build on it."""
        ...

    def recipe(self) -> dict[str, Scalar]:
        """Versions and settings of the framework that can change the bits. Nothing about topology."""
        ...

    def place(self, state: Any) -> list[Any]:
        """The user's state as a value for each memory, without a copy of what is there already."""
        ...

    def replicate(self, values: list[Any]) -> Any:
        """The inverse of `place`: equal values of all memories as one object for the user."""
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

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        """The total of the partial sums of every process, on the first local device.

        Only bytes move: whole values to all, or of large ones that are to be merged a slice to each
        process and then the slices of the total. `counts` are the partial sums of every process.
        Without `merge` the values of every process are the result.
        """
        ...

    def key(self, stream: Stream) -> Any:
        """A source of random numbers, in the form that the framework takes."""
        ...

    def runner(self) -> Callable[[Work, list[Any]], None]:
        """A function that runs the work of the local devices on placed states; one per TrainStep."""
        ...

    def fused_step(self, grad: Grad, update: Update, replicas: int, seed: int) -> FusedStep | str:
        """A whole step in fewer dispatches, or why there is none. One per TrainStep."""
        ...

    def eager_run(self, sum_over_replicas: SumOverReplicas) -> EagerRun:
        """The framework's part in one `strategy.run`."""
        ...


def in_turns(work: Work, states: list[Any], devices: int) -> None:
    """Run work on every device, a replica at a time, so that each gets some as early as possible."""
    waiting = [work(device, states[device % len(states)]) for device in range(devices)]
    while waiting:
        waiting = [turns for turns in waiting if next(turns, None) is not None]
