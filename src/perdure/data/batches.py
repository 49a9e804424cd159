"""What every dataset here is: a map from a step to the shares of a global batch.

Owns what does not depend on how examples are reached. Invariant: a share is a function of (step,
replica, replicas), and the shares of a step, one behind the other, are the same global batch for every
number of replicas. There is no iterator, hence no position to save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.data.augment import Augment
from perdure.data.stacking import with_weight
from perdure.errors import DataError, TopologyError

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Share:
    """Rows of a global batch: their examples, stacked, which they are, and their weights."""

    examples: Any
    index: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]


class Batches:
    """Base of the datasets. `num_examples` and `steps_per_epoch` are those of one epoch."""

    num_examples: int
    steps_per_epoch: int
    # Whether asking for steps out of order costs more than asking for them in order.
    in_order = False

    def __init__(
        self,
        batch_size: int,
        seed: int,
        augment: Augment | Callable[[Any, Any], Any] | None,
        fingerprint: str | None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.seed = seed
        self._augment = (
            augment if augment is None or isinstance(augment, Augment) else Augment(augment)
        )
        self._given = fingerprint

    def epoch(self, step: int) -> tuple[int, int]:
        """(epoch, step within that epoch) of a global step."""
        if step < 0:
            raise DataError(f"step must not be negative, got {step}")
        return divmod(step, self.steps_per_epoch)

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        """The contiguous rows of one of `replicas` equal shares of the global batch.

        A dict gets the entry "weight" (float32), a tuple or list one more member, anything else becomes
        (examples, weight). Raises TopologyError when the batch does not divide evenly, DataError with
        the step and the example when one cannot be had.
        """
        size = share_size(self.batch_size, replicas)
        if not 0 <= replica < replicas:
            raise TopologyError(f"replica must be 0 to {replicas - 1}, got {replica}")
        epoch, _ = self.epoch(step)
        try:
            share = self._share(step, replica * size, size)
            examples = share.examples
            if self._augment is not None:
                examples = self._augment(examples, share.index, (self.seed, epoch))
            return with_weight(examples, share.weight)
        except DataError as error:
            raise DataError(f"step {step}: {error}") from error.__cause__

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells the examples from others: see docs/DATA.md for how much of them it covers."""
        return self._own_fingerprint() if self._given is None else self._given

    def recipe(self) -> dict[str, str | int | bool]:
        """What of this dataset decides the result of a run."""
        return {
            "dataset": self.fingerprint,
            "examples": self.num_examples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            **self._own_recipe(),
            **({} if self._augment is None else self._augment.recipe()),
        }

    def _share(self, step: int, start: int, size: int) -> Share:
        """The rows [start, start + size) of the global batch of a step."""
        raise NotImplementedError

    def _own_fingerprint(self) -> str:
        raise NotImplementedError

    def _own_recipe(self) -> dict[str, str | int | bool]:
        raise NotImplementedError


def share_size(batch_size: int, replicas: int) -> int:
    """Rows of one replica; TopologyError when the global batch does not divide evenly."""
    if replicas < 1:
        raise TopologyError(f"replicas must be at least 1, got {replicas}")
    if batch_size % replicas:
        below = batch_size // replicas * replicas
        fits = f"{below} and {below + replicas}" if below else f"{replicas}"
        raise TopologyError(
            f"a global batch of {batch_size} does not divide into {replicas} logical replicas; "
            f"the nearest batch sizes that do: {fits}"
        )
    return batch_size // replicas
