"""Gives the loop the batch of a step, and says what to save of the data.

The position of an iterator is that before the batches that were fetched and not used yet.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from perdure.data.pipelines import by_index, gives_batch_of_step, refuse_pipeline
from perdure.data.sources import is_grain
from perdure.errors import DataError
from perdure.state import PositionedIterator, is_positioned
from perdure.state.adapter import Stateful


@dataclass
class BatchSource:
    """`fetch` returns the batch of a step, or raises StopIteration at an end of the data (`ends`)."""

    fetch: Callable[[int], Any]
    recipe: Mapping[str, Any]
    ends: bool = False


class IteratorBatchSource(BatchSource):
    """Batches from an iterator with a position; it is a member of the checkpoint."""

    def __init__(self, iterator: Any, recipe: Mapping[str, Any], *, ends: bool = True) -> None:
        super().__init__(self._next, recipe, ends)
        self._iterator = iterator
        self._before: Any = None
        kind = PositionedIterator if is_positioned(iterator) else Stateful
        self._place = kind(iterator)

    def used(self) -> None:
        self._before = None

    def state_dict(self) -> Any:
        return self._place.read() if self._before is None else self._before

    def load_state_dict(self, state: Any) -> None:
        self._before = None
        self._place.load(state)

    def _next(self, step: int) -> Any:
        if self._before is None:
            self._before = self._place.read()
        return self._fetch()

    def _fetch(self) -> Any:
        return next(self._iterator)


class LoaderBatchSource(IteratorBatchSource):
    """Batches from a loader that saves its position. One pass is an epoch; another pass follows."""

    def __init__(self, loader: Any, recipe: Mapping[str, Any]) -> None:
        super().__init__(loader, recipe, ends=False)
        self._epoch: Iterator[Any] | None = None

    def load_state_dict(self, state: Any) -> None:
        self._epoch = None
        super().load_state_dict(state)

    def _fetch(self) -> Any:
        # The rest of this epoch may be empty; two empty epochs after it end the data.
        for _ in range(3):
            if self._epoch is None:
                self._epoch = iter(self._iterator)
            for batch in self._epoch:
                return batch
            self._epoch = None
        raise StopIteration


def open_source(data: Any, strategy: Any = None) -> BatchSource:
    """The source of training batches for `data`, or DataError.

    A dataset with `batch(step)` (with a strategy: `strategy.batch(data, step)`), a strategy's
    distributed dataset, a function of the step (or without parameters, which returns the data), a
    sequence of batches or a loader with `state_dict` (which start again at their end), an iterator
    with a position, batches of Grain.
    """
    data = by_index(_returned(data))
    strategy_recipe = strategy.recipe() if strategy is not None else {}
    if callable(getattr(data, "from_step", None)):
        recipe = strategy.recipe(data) if strategy is not None else data.recipe()
        return BatchSource(lambda step: next(iter(data.from_step(step).take(1))), recipe)
    if is_grain(data, "MapDataset") and strategy is None:
        # Not modulo its length: Grain draws the order of the next epoch from the larger index.
        return BatchSource(partial(_grain_batch, data), {"batches": len(data)})
    if strategy is not None or not is_grain(data, "IterDataset"):
        refuse_pipeline(data)
    if gives_batch_of_step(data):
        fetch: Callable[[int], Any] = data.batch
        if strategy is not None:
            fetch, recipe = partial(strategy.batch, data), strategy.recipe(data)
        else:
            recipe = data.recipe() if hasattr(data, "recipe") else {}
        if (epochs := getattr(data, "epochs", None)) is None:
            return BatchSource(fetch, recipe)
        end = epochs * data.steps_per_epoch  # of a tf.data pipeline

        def fetch_before_end(step: int) -> Any:
            if step >= end:
                raise StopIteration
            return fetch(step)

        return BatchSource(fetch_before_end, recipe, ends=True)
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        count = len(data)
        if not count:
            raise DataError("the sequence of batches is empty; training needs at least one.")
        return BatchSource(lambda step: data[step % count], {**strategy_recipe, "batches": count})
    if callable(data) and not isinstance(data, Iterable):
        return BatchSource(data, strategy_recipe, ends=True)
    if isinstance(data, Iterable) and not isinstance(data, Iterator) and _has_state(data):
        return LoaderBatchSource(data, strategy_recipe)
    iterator = iter(data) if isinstance(data, Iterable) else data
    if is_positioned(iterator) or (hasattr(iterator, "__next__") and _has_state(iterator)):
        return IteratorBatchSource(iterator, strategy_recipe)
    raise DataError(
        f"expected data whose position can be restored after an interruption, found a "
        f"{type(data).__module__}.{type(data).__qualname__}. Pass a dataset with batch(step), a "
        f"function of the step, a list of batches, an iterator with get_state and set_state, or "
        f"state_dict and load_state_dict, or perdure.torch.ResumableLoader(loader)."
    )


def _returned(data: Any) -> Any:
    """What a function without parameters (`input_fn` of TensorFlow) returns; other data as it is."""
    is_function = isinstance(data, (FunctionType, MethodType, partial))
    return data() if is_function and not inspect.signature(data).parameters else data


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _grain_batch(data: Any, step: int) -> Any:
    if (batch := data[step]) is None:
        raise DataError(
            f"batch {step} of the grain.MapDataset is None: a filter after batch() dropped it. Filter "
            f"the examples before they are batched."
        )
    return batch


def evaluation_batches(data: Any, steps: int | None, strategy: Any = None) -> Iterator[Any]:
    """One pass over `data`, or its first `steps` batches. Any iterable will do: it is never resumed."""
    data = _returned(data)
    with suppress(DataError):  # a pipeline that has no index is read as it is
        data = by_index(data)
    if callable(getattr(data, "from_step", None)):
        # From its start, whatever its position: an evaluation depends on the step alone.
        data = data.from_step(0)
        yield from data.take(data.steps_per_epoch if steps is None else steps)
        return
    if isinstance(data, Iterable) and not gives_batch_of_step(data):
        yield from itertools.islice(data, steps)
        return
    if steps is None:
        steps = getattr(data, "steps_per_epoch", None)
    if steps is None:
        raise DataError(
            f"the length of a {type(data).__qualname__} is not known; pass `steps` to evaluate on it."
        )
    source = open_source(data, strategy)
    for number in range(steps):
        yield source.fetch(number)
