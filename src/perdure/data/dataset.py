"""Datasets: the map from a step to a global batch.

Invariant: the rows of a replica are a function of (step, replica, replicas), and the rows of all
replicas of a step, concatenated, are the same global batch for every number of replicas. Memory does
not grow with the number of examples. The random change of an example depends on the seed, the epoch
and the index of the example alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.checkpoint.arguments import step_number
from perdure.data.permutation import finalise, fold, permute
from perdure.data.sources import ArraySource, add_weight, as_source, stack, unstack
from perdure.errors import DataError, TopologyError

WeightedIndex = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Augment:
    """A random change of examples.

    Args:
        fn: `fn(example, rng)` returns the changed example; `rng` is a `numpy.random.Generator` for
            this example alone. An exception becomes a `DataError` that names the example.
        batched: whether it is `fn(batch, keys)`: `keys` is uint32[rows, 2], the data of one threefry
            key of JAX per row, and no row may depend on another.
        name: the name of the change in the recipe, by default that of the function. Change it when the
            function changes.
    """

    fn: Callable[[Any, Any], Any]
    batched: bool = False
    name: str | None = None

    def recipe(self) -> dict[str, str]:
        """The fields of a recipe. Another NumPy may draw other numbers from a Generator."""
        name = self.name or getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return {"augment": name} if self.batched else {"augment": name, "numpy": np.__version__}

    def __call__(self, batch: Any, index: npt.NDArray[np.int64], key: tuple[int, int]) -> Any:
        """The changed batch of the examples `index` (int64[rows]); `key` is (seed, epoch)."""
        words = example_keys(index, key)
        changed = []
        where = f"examples {index.min()} to {index.max()}"
        try:
            if self.batched:
                halves = [words[:, 0] >> np.uint64(32), words[:, 0] & np.uint64(0xFFFFFFFF)]
                return self.fn(batch, np.stack(halves, axis=-1).astype(np.uint32))
            for number, word, example in zip(index, words, unstack(batch), strict=True):
                where = f"example {number}"
                changed.append(self.fn(example, np.random.Generator(np.random.Philox(key=word))))
        except Exception as error:
            raise DataError(f"{where}: augment failed: {type(error).__name__}: {error}") from error
        return stack(changed, changed[0], lambda row: f"example {index[row]}, after augment")


def example_keys(index: npt.NDArray[np.int64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """128 bits per example, uint64[rows, 2]. Within an epoch no two examples share the first word."""
    first = finalise(np.uint64(fold(key)) ^ index.astype(np.uint64))
    second = finalise(first + np.uint64(fold((*key, 1))))
    return np.stack([first, second], axis=-1)


class DatasetBase:
    """Base of the datasets. `num_examples` and `steps_per_epoch` count one epoch."""

    num_examples: int
    steps_per_epoch: int
    sequential = False
    """Whether batches that are not asked for in the order of the steps cost more."""

    def __init__(
        self,
        batch_size: int,
        seed: int,
        augment: Augment | Callable[[Any, Any], Any] | None,
        fingerprint: str | None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size: expected at least 1, found {batch_size}.")
        self.batch_size = batch_size
        self.seed = seed
        if augment is not None and not isinstance(augment, Augment):
            augment = Augment(augment)
        self._augment = augment
        self._given_fingerprint = fingerprint
        self._settings: dict[str, int | bool] = {}  # for the recipe

    def epoch(self, step: int) -> tuple[int, int]:
        """The epoch of a global step, and its number within that epoch; both start at 0."""
        return divmod(step_number(step), self.steps_per_epoch)

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        """The rows of one logical replica in the global batch of a step.

        Args:
            step: the global step.
            replica: which of the equal, contiguous parts of the batch.
            replicas: the number of parts.

        Returns:
            The stacked examples with their weights (float32[batch_size / replicas]; 0 for padding): a
            dict gets the entry "weight", a tuple or list one more member, anything else becomes
            (examples, weight).

        Raises:
            TopologyError: the batch does not divide evenly.
            ArgumentError: `step` is negative, or no integer.
            DataError: an example cannot be read; the message names the step and the example.
        """
        step = step_number(step)
        size = rows_per_replica(self.batch_size, replicas)
        if not 0 <= replica < replicas:
            raise TopologyError(f"replica: expected 0 to {replicas - 1}, found {replica}.")
        try:
            examples, index, weight = self._rows(step, replica * size, size)
            if self._augment is not None:
                examples = self._augment(examples, index, (self.seed, self.epoch(step)[0]))
            return add_weight(examples, weight)
        except DataError as error:
            raise DataError(f"step {step}: {error}") from error.__cause__

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the examples. docs/DATA.md says how many of their bytes it covers."""
        given = self._given_fingerprint
        return self._compute_fingerprint() if given is None else given

    def recipe(self) -> dict[str, str | int | bool]:
        """The fields of a recipe that this dataset decides."""
        return {
            "dataset": self.fingerprint,
            "examples": self.num_examples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            **self._settings,
            **({} if self._augment is None else self._augment.recipe()),
        }

    def _rows(
        self, step: int, start: int, size: int
    ) -> tuple[Any, npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The stacked rows [start, start + size) of a global batch, their numbers and weights."""
        raise NotImplementedError

    def _compute_fingerprint(self) -> str:
        raise NotImplementedError


class Dataset(DatasetBase):
    """Batches of the examples of any object with `__len__` and `__getitem__`.

    Args:
        source: a list, a torch Dataset, a Grain MapDataset or the like. An example is an array, a
            number, or a dict, tuple or list of them, of one structure, dtypes and shapes.
        batch_size: rows of the *global* batch.
        seed: decides the order of the examples and what `augment` draws.
        shuffle: whether every epoch has an order of its own; otherwise it is that of `source`.
        drop_remainder: whether to leave out the last batch of an epoch if it is incomplete. Otherwise
            it is padded with rows from the start of that epoch's order, which have weight 0.
        augment: a function (example, rng) or an `Augment`.
        fingerprint: a name and version of the data, in place of the computed fingerprint.

    Raises:
        DataError: there are no examples, or no whole batch with `drop_remainder`.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool = False,
        augment: Augment | Callable[[Any, Any], Any] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, augment, fingerprint)
        self._source = self._open(source)
        self.num_examples = len(self._source)
        if drop_remainder and batch_size > self.num_examples:
            raise DataError(
                f"drop_remainder leaves no batch: batch_size is {batch_size} and there are "
                f"{self.num_examples} examples."
            )
        self.shuffle = shuffle
        self._settings = {"shuffle": shuffle, "drop_remainder": drop_remainder}
        whole, rest = divmod(self.num_examples, batch_size)
        self.steps_per_epoch = whole if drop_remainder or not rest else whole + 1
        self._last_index: tuple[int, WeightedIndex] | None = None

    _open = staticmethod(as_source)

    def indices(self, step: int) -> WeightedIndex:
        """The examples of a global batch (int64[batch_size]) and their weights (float32; 0 pads)."""
        if self._last_index is not None and self._last_index[0] == step:
            return self._last_index[1]
        epoch, within = self.epoch(step)
        position = np.arange(within * self.batch_size, (within + 1) * self.batch_size)
        weight = (position < self.num_examples).astype(np.float32)
        index = position % self.num_examples
        if self.shuffle:
            index = permute(index, self.num_examples, (self.seed, epoch))
        # Kept because the replicas of a step ask one after the other.
        index.flags.writeable = weight.flags.writeable = False
        self._last_index = (step, (index, weight))
        return index, weight

    def _rows(self, step: int, start: int, size: int) -> Any:
        batch_index, batch_weight = self.indices(step)
        index = batch_index[start : start + size]
        examples = self._source.take(index, self.epoch(step)[0])
        return examples, index, batch_weight[start : start + size].copy()

    def _compute_fingerprint(self) -> str:
        return self._source.fingerprint()


class ArrayDataset(Dataset):
    """Batches of the examples in arrays, which are in memory or mapped from files.

    Args:
        source: a dict of arrays, a tuple of arrays or one array, `[examples, ...]` each. They are not
            copied, so do not write into them.

    The other arguments and the errors are those of `Dataset`.

    Attributes:
        epochs: How often the examples are repeated; None for ever.
    """

    epochs: int | None = None
    _open = staticmethod(ArraySource)


def rows_per_replica(batch_size: int, replicas: int) -> int:
    """The rows of one replica; TopologyError if the batch does not divide evenly."""
    if replicas < 1:
        raise TopologyError(f"replicas: expected at least 1, found {replicas}.")
    if batch_size % replicas:
        smaller = batch_size // replicas * replicas
        nearest = f"{smaller} and {smaller + replicas}" if smaller else f"{replicas}"
        raise TopologyError(
            f"a global batch of {batch_size} does not divide into {replicas} logical replicas; "
            f"the nearest batch sizes that do: {nearest}"
        )
    return batch_size // replicas
