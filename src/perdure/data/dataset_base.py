"""`DatasetBase`: what all datasets have in common, however their examples are read.

Invariant: the rows of a replica are a function of (step, replica, replicas), and the rows of all
replicas of a step, concatenated, are the same global batch for every number of replicas. There is no
iterator, and so no position to save.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.data.augment import Augment
from perdure.data.example_trees import add_weight
from perdure.errors import DataError, TopologyError

WeightedIndex = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""The example number (int64) and the weight (float32) of each of some rows."""


@dataclass(frozen=True)
class ReplicaRows:
    """The rows of one logical replica in a global batch.

    `examples` is a tree of arrays with a leading axis over the rows, `index` the number of each example
    (int64[rows]), and `weight` its weight: 1, or 0 for padding (float32[rows]).
    """

    examples: Any
    index: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]


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
        self._augment = (
            augment if augment is None or isinstance(augment, Augment) else Augment(augment)
        )
        self._given_fingerprint = fingerprint

    def epoch(self, step: int) -> tuple[int, int]:
        """The epoch of a global step, and its number within that epoch. Both start at 0.

        Raises:
            DataError: `step` is negative, or no integer.
        """
        return divmod(step_index(step), self.steps_per_epoch)

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        """The rows of one logical replica in the global batch of a step.

        Args:
            step: the global step.
            replica: which of the equal, contiguous parts of the batch.
            replicas: the number of parts; it must divide `batch_size`.

        Returns:
            The stacked examples with their weights (float32[batch_size / replicas]; 0 for padding): a
            dict gets the entry "weight", a tuple or list one more member, anything else becomes
            (examples, weight).

        Raises:
            TopologyError: the batch does not divide evenly.
            DataError: `step` is negative, or no integer; or an example cannot be read, and the message
                names the step and the example.
        """
        step = step_index(step)
        size = rows_per_replica(self.batch_size, replicas)
        if not 0 <= replica < replicas:
            raise TopologyError(f"replica: expected 0 to {replicas - 1}, found {replica}.")
        epoch, _ = self.epoch(step)
        try:
            rows = self._rows(step, replica * size, size)
            examples = rows.examples
            if self._augment is not None:
                examples = self._augment(examples, rows.index, (self.seed, epoch))
            return add_weight(examples, rows.weight)
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
            **self._recipe_fields(),
            **({} if self._augment is None else self._augment.recipe()),
        }

    def _rows(self, step: int, start: int, size: int) -> ReplicaRows:
        """The rows [start, start + size) of the global batch of a step."""
        raise NotImplementedError

    def _compute_fingerprint(self) -> str:
        raise NotImplementedError

    def _recipe_fields(self) -> dict[str, str | int | bool]:
        raise NotImplementedError


def step_index(step: Any) -> int:
    """`step` as an int, from an integer of any framework; raises `DataError` for another value."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        found = f"{step!r} of type {type(step).__name__}"
        raise DataError(f"step: expected an integer of at least 0, found {found}.") from None
    if number < 0:
        raise DataError(f"step: expected an integer of at least 0, found {number}.")
    return number


def rows_per_replica(batch_size: int, replicas: int) -> int:
    """The number of rows of one replica; raises `TopologyError` if the batch does not divide evenly."""
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
