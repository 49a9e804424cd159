"""The verbs that a framework supplies to the strategies.

Owns the seam between the tree, which is ours, and the arithmetic, which is the framework's.
Invariant: every floating-point operation of a step happens in `grad`, `add` or `update`, each one a
program of its own that does not know the topology; all other verbs move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from perdure.process_group import Processes

Scalar = str | int | float | bool

# grad(state, batch, key) -> contributions; update(state, total) -> (state, logs)
Grad = Callable[[Any, Any, Any], Any]
Update = Callable[[Any, Any], tuple[Any, Any]]


# work(device, state) contributes the replicas of one local device, one at each step of the iteration,
# which gives (replica, contribution). It may be begun afresh.
Work = Callable[[int, Any], Iterator[tuple[int, Any]]]


# together(state, shares of all replicas, step) -> (state, logs), with the bits of the step that is made
# of the verbs below; None where it does not apply, and the verbs are to be used.
Together = Callable[[Any, Sequence[Any], int], tuple[Any, Any] | None]


# The values of every process -> their sum, in the tree. A value may also be a slice of all of them.
Merge = Callable[[list[list[Any]]], Any]

# From this size in bytes of all partial sums of a process, slices are exchanged.
SLICED_FROM = 4 << 20


def sliced(nbytes: int, counts: tuple[int, ...]) -> bool:
    """Whether slices of what is merged are exchanged; the same in every process.

    With P processes each receives P - 1 times its bytes as wholes and 2 (P - 1) / P times as slices,
    in two rounds: of two processes slices are never better.
    """
    return len(counts) > 2 and nbytes * max(counts) >= SLICED_FROM


class Stream(NamedTuple):
    """What every random number is a function of."""

    seed: int
    step: int
    replica: int


class Guard:
    """What one `run` keeps apart between its replicas; here nothing."""

    def replica(self, replica: int, own: Any) -> AbstractContextManager[None]:
        """Surrounds the function of a replica; `own` are arguments that only this replica has."""
        return nullcontext()

    def leave(self, replica: int) -> None:
        """Another replica runs next, in the middle of the function of this one."""

    def resume(self, replica: int) -> None:
        """This replica continues."""

    def finish(self) -> None:
        """All replicas have ended well. A collective."""


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
        """The user's state as one value per memory; no copy of what is there already.

        One for each local device, or a single one where all of them share their memory.
        """
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

    def runner(self) -> Callable[[Work, list[Any]], None]:
        """What runs the work of the local devices on placed states; one for each TrainStep.

        As much at once as the framework can, and with the same bits as one device after another.
        """
        ...

    def together(self, grad: Grad, update: Update, replicas: int, seed: int) -> Together | None:
        """A whole step at once, where this engine has such a way and proves it; one per TrainStep."""
        ...

    def exchange(
        self, roots: list[Any], counts: tuple[int, ...], merge: Merge | None = None
    ) -> Any:
        """The total of the partial sums of every process, on the first local device.

        `counts` is the number of them in every process; `roots` are this process's own. `merge` adds
        values with `add`; without it, the values of every process are the result. Between processes
        only bytes move: whole values to everybody, or, of large ones that are to be merged, a slice
        to each process, and then the total's slices to everybody.
        """
        ...

    def call(
        self,
        fn: Callable[..., Any],
        device: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> Any:
        """fn(*args, **kwargs), eagerly, with the arrays on `device`.

        With `stream`, what the framework's global generators give is a function of it.
        """
        ...

    def guard(self, strategy: Any) -> Guard:
        """What keeps the replicas of one `run` of this strategy apart."""
        ...

    def random_state(self) -> Any:
        """State of the framework's global generators; not None."""
        ...

    def set_random_state(self, state: Any) -> None: ...

    def settings(self) -> Callable[[], AbstractContextManager[None]]:
        """What the calling thread computes under, to be entered in another thread."""
        ...

    def key(self, stream: Stream) -> Any:
        """What the framework takes as a source of random numbers."""
        ...

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        """`fn` of every leaf as an array, in the same structure."""
        ...

    def stack(self, values: list[Any]) -> Any:
        """One value, whose leaves are those of all values along a new first axis."""
        ...

    def signature(self, value: Any) -> Hashable:
        """Structure, dtypes and shapes; equal for values that can be added."""
        ...

    def describe(self, value: Any) -> dict[str, str]:
        """dtype and shape of every leaf, by path."""
        ...


def in_turns(work: Work, states: list[Any], devices: int) -> None:
    """Run work on every device, a replica at a time, so that each has some as early as possible."""
    waiting = [work(device, states[device % len(states)]) for device in range(devices)]
    while waiting:
        waiting = [turns for turns in waiting if next(turns, None) is not None]
