"""The base class of metrics, in both styles of use: functional, and as an object.

Accumulators change by one total for each step, in the order of the steps, and each total went through
the fixed tree. So they are the same for every topology. No framework is named here.

An accumulator is an array of shape [2, ...], the high and the low part, with the same dtypes on every
engine, so that a checkpoint of one restores on another. A counter (int32) is exact up to 2**61,
without 64-bit integers, which JAX lacks by default. A sum (float32) keeps the rounding error of each
addition in its low part (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B: TwoSum).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perdure.distribute.arrays import is_traced, namespace, on_host
from perdure.distribute.run.context import current, current_strategy, get_replica_context
from perdure.distribute.run.replicas import current_run
from perdure.distribute.values import PerReplica
from perdure.errors import StateError
from perdure.tensorflow_names import TensorFlowNames

COUNTER, SUM = "int32", "float32"

_BITS = 30


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    """An empty counter or sum for values of `shape`. NumPy, which every engine takes."""
    return np.zeros((2, *shape), dtype)


def added(accumulator: Any, value: Any) -> Any:
    """The accumulator with `value` added: integers (below 2**30 in size) or float32."""
    xp = namespace(accumulator, value)
    high, low = xp.array(accumulator)
    if _is_counter(accumulator):
        low = low + xp.constant(value, COUNTER)
        # A shift rounds down, so that the low part is never negative.
        return xp.array(xp.stack([high + (low >> _BITS), low & ((1 << _BITS) - 1)]), COUNTER)
    value = xp.constant(value, SUM)
    total = high + value
    part = total - high
    error = (high - (total - part)) + (value - part)
    return xp.stack([total, low + error])


def read_value(accumulator: Any) -> Any:
    """The value: NumPy's int64 or float64; inside of jit, a float, which may be rounded."""
    high, low = on_host(accumulator)
    if is_traced(accumulator):
        return high * float(1 << _BITS) + low if _is_counter(accumulator) else high + low
    if _is_counter(accumulator):
        return (np.int64(high) << _BITS) + np.int64(low)
    return np.float64(high) + np.float64(low)


def _is_counter(accumulator: Any) -> bool:
    return "int" in str(accumulator.dtype)


# Updates that go through the tree together. The number bounds memory and does not change the result.
_PENDING = 64


class Metric(TensorFlowNames):
    """Base of all metrics.

    Functional, for `strategy.step`: `init()` goes into the state, `contribution(...)` among what grad
    returns, `merge(accumulators, total)` into update, `result(accumulators)` where it is read.

    As an object, in TensorFlow's manner: made in `with strategy.scope():` (or under no strategy at
    all), `update_state(...)` in the function of `strategy.run`, then `result()` and `reset_state()`.
    It is a member of `Checkpoint`. `result` and saving are collectives: every process does them.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__
        # In a function, so that a search for modules in a state does not enter the strategy.
        strategy = _current_strategy()
        self._strategy = lambda: strategy
        self._pending: list[PerReplica] = []
        self._accumulators = self.init()

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and kind (COUNTER or SUM) of everything that accumulates, by name."""
        raise NotImplementedError

    def contribution(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What one replica's share adds to the fields, as arrays of int32 or float32."""
        raise NotImplementedError

    def value(self, read: dict[str, Any]) -> Any:
        """The metric, from the values of the fields."""
        raise NotImplementedError

    def init(self) -> dict[str, Any]:
        """Empty accumulators: arrays [2, ...] by name."""
        return {name: empty(*field) for name, field in self.fields().items()}

    def merge(self, accumulated: Mapping[str, Any], total: Mapping[str, Any]) -> dict[str, Any]:
        """The accumulators after a step whose contributions sum to `total`."""
        return {name: added(accumulated[name], total[name]) for name in accumulated}

    def result(self, accumulated: Mapping[str, Any] | None = None) -> Any:
        """The metric over all steps so far. A collective for objects of a strategy.

        Args:
            accumulated: The accumulators of the functional style; by default those of the object.

        Returns:
            The metric in float64, NaN if nothing was counted. Inside of jit it is rounded to float32.
        """
        if accumulated is None:
            self._flush("result()")
            accumulated = self._accumulators
        return self.value({name: read_value(a) for name, a in accumulated.items()})

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the contribution of these arguments (see `contribution`).

        In the function of strategy.run they are the share of this replica; elsewhere the whole batch,
        the same in every process.

        Raises:
            StateError: Called inside of jit, in `grad` or `update`, or in the scope of another
                strategy.
        """
        self._check_scope()
        value = self.contribution(*args, **kwargs)
        if any(map(is_traced, value.values())):
            raise StateError(
                f"{self}: update_state was called inside of jit, where there are no values to keep; "
                "return metric.contribution(...) from the compiled function"
            )
        if (context := current_run()) is not None:
            context.record(self, value)
            return
        self._flush("update_state()")
        self._accumulators = self.merge(self._accumulators, _on_host(value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`update_state`, then `result`; None in the function of strategy.run, which has no result."""
        self.update_state(*args, **kwargs)
        return self.result() if current_run() is None else None

    def reset_state(self) -> None:
        """Empty the accumulators."""
        self._outside_of_replicas("reset_state()")
        self._pending = []
        self._accumulators = self.init()

    reset_states = reset_state

    def state_dict(self) -> dict[str, Any]:
        """The accumulators, as NumPy arrays of their own."""
        self._flush("saving")
        return {name: array.copy() for name, array in self._accumulators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore accumulators. Raises StateError if they belong to another metric."""
        wanted = {name: f"{a.dtype}{list(a.shape)}" for name, a in self.init().items()}
        arrays = {name: np.array(on_host(array)) for name, array in state.items()}
        found = {name: f"{a.dtype}{list(a.shape)}" for name, a in arrays.items()}
        if wanted != found:
            raise StateError(
                f"{self}: expected the accumulators {wanted}, found {found}. Give the metric the "
                f"arguments that it had when it was saved."
            )
        self._pending = []
        self._accumulators = arrays

    def commit(self, rounds: list[PerReplica]) -> None:
        """Called by strategy.run when all replicas have ended."""
        self._pending += rounds
        if len(self._pending) >= _PENDING:
            self._flush("update_state()")

    def __repr__(self) -> str:
        return f'{type(self).__name__} "{self.name}"'

    def _flush(self, what: str) -> None:
        """Bring what replicas recorded through the tree, and add it in the order of the runs."""
        self._outside_of_replicas(what)
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        strategy = self._strategy()
        assert strategy is not None, "only the replicas of a strategy record"
        replicas = strategy.local_replicas
        values = [
            {str(n): value.values[position] for n, value in enumerate(pending)}
            for position in range(len(replicas))
        ]
        totals = strategy.reduce("sum", PerReplica(tuple(values), replicas))
        for n in range(len(pending)):
            self._accumulators = self.merge(self._accumulators, _on_host(totals[str(n)]))

    def _check_scope(self) -> None:
        scope = current()
        if scope is not None and scope.compiled is not None:
            raise StateError(
                f"{self}: update_state in {scope.compiled} of a step, which must be pure; return "
                "metric.contribution(...) from grad, and use metric.merge(...) in update"
            )
        owner, caller = self._strategy(), _current_strategy()
        if caller is owner:
            return
        if owner is None:
            raise StateError(
                f"{self} was made outside of the scope of the strategy under which it is updated; make "
                "it in `with strategy.scope():`"
            )
        if caller is None:
            raise StateError(
                f"{self} belongs to a strategy and is updated outside of its scope; call update_state "
                "in the function of strategy.run, or in `with strategy.scope():`"
            )
        raise StateError(f"{self} belongs to the scope of another strategy than the one that runs")

    def _outside_of_replicas(self, what: str) -> None:
        if get_replica_context() is not None:
            raise StateError(
                f"{self}: {what} in a logical replica, which has only its own share; call it after "
                "strategy.run"
            )


def _current_strategy() -> Any:
    return None if current() is None else current_strategy()


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: on_host(value) for name, value in values.items()}
