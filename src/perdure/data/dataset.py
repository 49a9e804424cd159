"""A dataset whose examples are addressed by index.

Owns the map from a step to the examples of a global batch. Invariant: which examples a batch holds,
and their order in it, are a function of (seed, step) and of the number of examples. Memory does not
grow with that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.data.augment import Augment
from perdure.data.batches import Batches, Rows, Share
from perdure.data.permutation import permute
from perdure.data.sources import Arrays, as_source
from perdure.errors import DataError


class Dataset(Batches):
    """Batches of the examples of `source`: any object with `__len__` and `__getitem__`.

    A list, a torch Dataset, a Grain MapDataset. An example is an array, a number, or a dict, tuple or
    list of them; all have one structure, dtype and shape. `batch_size` is the size of the *global*
    batch. Every epoch has its own order when `shuffle` is true. The last batch of an epoch is padded
    with rows from the start of that epoch's order, which get weight 0; with `drop_remainder` it is
    left out. `augment` is a function (example, rng) or an `Augment`. `fingerprint` replaces the one
    that is computed from examples: a name and version that change whenever the data does.
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
        self._source = source if isinstance(source, Arrays) else as_source(source)
        self.num_examples = len(self._source)
        if drop_remainder and batch_size > self.num_examples:
            raise DataError(
                f"drop_remainder leaves no batch: batch_size is {batch_size} and there are "
                f"{self.num_examples} examples; use a smaller batch_size or drop_remainder=False"
            )
        self.shuffle = shuffle
        self.drop_remainder = drop_remainder
        whole, rest = divmod(self.num_examples, batch_size)
        self.steps_per_epoch = whole if drop_remainder or not rest else whole + 1
        self._memo: tuple[int, Rows] | None = None

    def indices(self, step: int) -> Rows:
        """Example number and weight (1, or 0 for padding) of every row of the global batch."""
        memo = self._memo
        if memo is not None and memo[0] == step:
            return memo[1]
        epoch, within = self.epoch(step)
        position = np.arange(within * self.batch_size, (within + 1) * self.batch_size)
        weight = (position < self.num_examples).astype(np.float32)
        index = position % self.num_examples
        if self.shuffle:
            index = permute(index, self.num_examples, (self.seed, epoch))
        # The replicas of a step ask one after the other. A memo of a pure function is no position.
        index.flags.writeable = weight.flags.writeable = False
        self._memo = (step, (index, weight))
        return index, weight

    def _share(self, step: int, start: int, size: int) -> Share:
        every, weights = self.indices(step)
        index = every[start : start + size]
        examples = self._source.take(index, self.epoch(step)[0])
        return Share(examples, index, weights[start : start + size].copy())

    def _own_fingerprint(self) -> str:
        return self._source.fingerprint()

    def _own_recipe(self) -> dict[str, str | int | bool]:
        return {"shuffle": self.shuffle, "drop_remainder": self.drop_remainder}


class ArrayDataset(Dataset):
    """Examples held in arrays with one common leading length, in memory or mapped from files.

    `arrays` is a dict of arrays, a tuple of arrays or one array. They are not copied: do not write into
    them. Everything else is as in `Dataset`.
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
        source = Arrays(arrays)
        super().__init__(
            source,
            batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_remainder=drop_remainder,
            augment=augment,
            fingerprint=fingerprint,
        )
        self._arrays = source.named
