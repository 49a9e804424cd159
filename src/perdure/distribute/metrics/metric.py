"""The base classes of metrics, in both styles of use: functional, and as an object.

Accumulators change by one total for each step, which went through the fixed tree. Each is an array
[2, ...] of a high and a low part, with the same dtypes on every engine. A counter (int32) is exact
up to 2**61, without 64-bit integers. A sum (float32) keeps the rounding errors in its low part
(Knuth, The Art of Computer Programming 2, 4.2.2, theorem B: TwoSum).
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


class Counting(Metric):
    """Counts examples, or sums their weights.

    `sample_weight` is a mask of 0 and 1, such as the weights that mark padded rows. With
    weighted=True it may be any weight; counts are then float32 sums. Without `weighted`, every field is
    an integer counter, other weights are counted too, and the metric raises an error when it is read.
    """

    def __init__(self, name: str | None = None, *, weighted: bool = False) -> None:
        self.weighted = weighted
        super().__init__(name)

    @property
    def kind(self) -> str:
        return SUM if self.weighted else COUNTER

    def counts(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the counters, by name."""
        raise NotImplementedError

    def faults(self) -> dict[str, str]:
        """Advice for each kind of invalid input, by the name of its counter."""
        return {} if self.weighted else {"misweighted": _MISWEIGHTED}

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        counts = {name: (shape, self.kind) for name, shape in self.counts().items()}
        return counts | dict.fromkeys(self.faults(), ((), COUNTER))

    def value(self, read: dict[str, Any]) -> Any:
        wrong = 0
        for name, advice in self.faults().items():
            if not is_traced(read[name]) and read[name]:
                raise StateError(f"{self}: {read[name]} {advice}")
            wrong = wrong + read.pop(name)
        result = self.of_counts(read)
        return namespace(result).where(wrong > 0, np.nan, result) if is_traced(wrong) else result

    def of_counts(self, counts: dict[str, Any]) -> Any:
        """The metric, from the values of `counts`."""
        raise NotImplementedError

    def weights(self, xp: Any, sample_weight: Any, rows: Any) -> tuple[Any, dict[str, Any]]:
        """(the weight of every element of an array such as `rows`, the counter of wrong ones)."""
        weight = spread(xp, sample_weight, rows.shape)
        if self.weighted:
            return weight, {}
        wrong = xp.sum(xp.array((weight != 0) & (weight != 1), COUNTER))
        return xp.array(weight != 0, COUNTER), {"misweighted": wrong}


_MISWEIGHTED = (
    "rows had a weight other than 0 and 1, and this metric counts; make it with weighted=True to sum "
    "weights"
)


def spread(xp: Any, sample_weight: Any, shape: Any) -> Any:
    """float32 weights in `shape`, from weights of its first axes; 1 for None."""
    ones = xp.ones(shape, SUM)
    if sample_weight is None:
        return ones
    weight = xp.constant(sample_weight, SUM)
    if weight.ndim > ones.ndim or tuple(weight.shape) != tuple(shape[: weight.ndim]):
        raise StateError(
            f"sample_weight has the shape {list(weight.shape)}; expected the first axes of "
            f"{list(shape)}"
        )
    return ones * weight.reshape(tuple(weight.shape) + (1,) * (ones.ndim - weight.ndim))


def ratio(part: Any, whole: Any) -> Any:
    """part / whole, NaN for 0 / 0; a Python float outside of jit."""
    if is_traced(whole):
        return part / whole
    return float(part) / float(whole) if whole else float("nan")


def classes(xp: Any, labels: Any, scores: Any) -> Any:
    """Integer labels of shape [...] for scores of shape [..., classes]; [..., 1] is taken too."""
    labels = xp.constant(labels, COUNTER)
    if labels.ndim == scores.ndim and labels.shape[-1] == 1:
        labels = labels.reshape(tuple(labels.shape[:-1]))
    same_shape("labels", labels, scores[..., 0])
    return labels


def same_shape(name: str, value: Any, like: Any) -> None:
    """StateError unless the shapes agree: broadcasting would count pairs."""
    if tuple(value.shape) != tuple(like.shape):
        raise StateError(
            f"{name} have the shape {list(value.shape)}, expected {list(like.shape)} to fit the "
            "predictions"
        )
