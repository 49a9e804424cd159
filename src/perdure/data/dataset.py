"""Datasets whose examples are read by index.

Invariant: the examples of a batch and their order are a function of the seed, the step and the number
of examples. Memory does not grow with that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.data.augment import Augment
from perdure.data.dataset_base import DatasetBase, ReplicaRows, WeightedIndex
from perdure.data.permutation import permute
from perdure.data.sources import ArraySource, as_source
from perdure.errors import DataError


class Dataset(DatasetBase):
    """Batches of the examples of any object with `__len__` and `__getitem__`.

    Args:
        source: a list, a torch Dataset, a Grain MapDataset or the like. An example is an array, a
            number, or a dict, tuple or list of them; all have the same structure, dtypes and shapes.
        batch_size: rows of the *global* batch.
        seed: decides the order of the examples and what `augment` draws.
        shuffle: whether every epoch has an order of its own; otherwise it is that of `source`.
        drop_remainder: whether to leave out the last batch of an epoch if it is incomplete. Otherwise
            it is padded with rows from the start of that epoch's order, which have weight 0.
        augment: a function (example, rng) or an `Augment`.
        fingerprint: replaces the fingerprint that is computed from examples: a name and version that
            change whenever the data change.

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
        self._source = source if isinstance(source, ArraySource) else as_source(source)
        self.num_examples = len(self._source)
        if drop_remainder and batch_size > self.num_examples:
            raise DataError(
                f"drop_remainder leaves no batch: batch_size is {batch_size} and there are "
                f"{self.num_examples} examples; use a smaller batch_size or drop_remainder=False."
            )
        self.shuffle = shuffle
        self.drop_remainder = drop_remainder
        whole, rest = divmod(self.num_examples, batch_size)
        self.steps_per_epoch = whole if drop_remainder or not rest else whole + 1
        self._last_index: tuple[int, WeightedIndex] | None = None

    def indices(self, step: int) -> WeightedIndex:
        """Which examples are in the global batch of a step.

        Returns:
            The number of each example (int64[batch_size]), and its weight (float32[batch_size]): 1, or
            0 for padding. Both are read-only.
        """
        last = self._last_index
        if last is not None and last[0] == step:
            return last[1]
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

    def _rows(self, step: int, start: int, size: int) -> ReplicaRows:
        batch_index, batch_weight = self.indices(step)
        index = batch_index[start : start + size]
        examples = self._source.take(index, self.epoch(step)[0])
        return ReplicaRows(examples, index, batch_weight[start : start + size].copy())

    def _compute_fingerprint(self) -> str:
        return self._source.fingerprint()

    def _recipe_fields(self) -> dict[str, str | int | bool]:
        return {"shuffle": self.shuffle, "drop_remainder": self.drop_remainder}


class ArrayDataset(Dataset):
    """Batches of the examples in arrays, which are in memory or mapped from files.

    Args:
        arrays: a dict of arrays, a tuple of arrays or one array, `[examples, ...]` each. They are not
            copied, so do not write into them.

    The other arguments and the errors are those of `Dataset`.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.ArrayLike] | tuple[npt.ArrayLike, ...] | npt.ArrayLike,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool = False,
        augment: Augment | Callable[[Any, Any], Any] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        source = ArraySource(arrays)
        super().__init__(
            source,
            batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_remainder=drop_remainder,
            augment=augment,
            fingerprint=fingerprint,
        )
        self._arrays = source.arrays
