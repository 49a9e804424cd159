"""Arrays in memory as a dataset that is addressed by step.

Owns the map from a step to the rows of a global batch. Invariant: the rows of a batch, and their
order in it, are a function of (seed, step) and of the dataset; how the batch is divided among
replicas never changes them. There is no iterator, hence no position to save.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from perdure.data.permutation import permute
from perdure.errors import DataError, TopologyError

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class ArrayDataset:
    """Examples held in arrays with one common leading length.

    `arrays` is a dict of arrays, a tuple of arrays or one array; `batch_size` is the size of the
    *global* batch. Every epoch has its own order when `shuffle` is true. The last batch of an epoch
    is padded with rows from the start of that epoch's order, which get weight 0; with
    `drop_remainder` it is left out.

    The arrays are not copied: do not write into them.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.ArrayLike] | tuple[npt.ArrayLike, ...] | npt.ArrayLike,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool = False,
    ) -> None:
        self._kind, self._arrays = _named(arrays)
        self.num_examples = _common_length(self._arrays)
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        if drop_remainder and batch_size > self.num_examples:
            raise DataError(
                f"drop_remainder leaves no batch: batch_size is {batch_size} and there are "
                f"{self.num_examples} examples; use a smaller batch_size or drop_remainder=False"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_remainder = drop_remainder
        self._memo: tuple[int, Rows] | None = None

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_remainder:
            return self.num_examples // self.batch_size
        return -(-self.num_examples // self.batch_size)

    def epoch(self, step: int) -> tuple[int, int]:
        """(epoch, step within that epoch) of a global step."""
        if step < 0:
            raise DataError(f"step must not be negative, got {step}")
        return divmod(step, self.steps_per_epoch)

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

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        """The contiguous rows of one of `replicas` equal shares of the global batch.

        A dict gets the entry "weight" (float32), a tuple one more member, a single array becomes
        (array, weight). Raises TopologyError when the batch does not divide evenly.
        """
        share = share_size(self.batch_size, replicas)
        if not 0 <= replica < replicas:
            raise TopologyError(f"replica must be 0 to {replicas - 1}, got {replica}")
        index, weight = self.indices(step)
        rows = slice(replica * share, (replica + 1) * share)
        taken = {name: array[index[rows]] for name, array in self._arrays.items()}
        if self._kind == "dict":
            return {**taken, "weight": weight[rows].copy()}
        return (*taken.values(), weight[rows].copy())

    @functools.cached_property
    def fingerprint(self) -> str:
        """BLAKE3 over name, dtype, shape and bytes of every array, as hex."""
        digest = blake3.blake3()
        for name in sorted(self._arrays):
            array = np.ascontiguousarray(self._arrays[name])
            header = f"{name}\0{array.dtype.name} {array.dtype.str}\0{array.shape}\0".encode()
            digest.update(len(header).to_bytes(8, "little") + header)
            # As bytes, because dtypes such as bfloat16 do not offer the buffer protocol.
            digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def recipe(self) -> dict[str, str | int | bool]:
        """What of this dataset decides the result of a run."""
        return {
            "dataset": self.fingerprint,
            "examples": self.num_examples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_remainder": self.drop_remainder,
        }


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


def _named(arrays: Any) -> tuple[str, dict[str, npt.NDArray[Any]]]:
    if isinstance(arrays, Mapping):
        if "weight" in arrays:
            raise DataError(
                'the dict of arrays has an entry "weight", the name under which a batch carries the '
                "weights that mark padding; rename the entry"
            )
        for name in arrays:
            if not isinstance(name, str):
                raise DataError(f"names of arrays must be strings, found {name!r}")
        kind, named = "dict", dict(arrays)
    elif isinstance(arrays, tuple):
        kind, named = "tuple", {str(i): array for i, array in enumerate(arrays)}
    else:
        kind, named = "tuple", {"0": arrays}
    return kind, {name: np.asarray(array) for name, array in named.items()}


def _common_length(arrays: dict[str, npt.NDArray[Any]]) -> int:
    if not arrays:
        raise DataError("no arrays: a dataset needs at least one")
    for name, array in arrays.items():
        if array.ndim == 0:
            raise DataError(f"array {name!r} is a scalar; its first axis must be the examples")
        if array.dtype.hasobject:
            raise DataError(f"array {name!r} holds Python objects, which have no fixed bytes")
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(f"arrays differ in the length of their first axis ({found})")
    length = next(iter(lengths.values()))
    if length == 0:
        raise DataError("the arrays hold no examples")
    return length
