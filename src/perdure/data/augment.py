"""Random changes of examples.

Invariant: the change of an example depends on the seed, the epoch and the index of the example, and not
on its batch, its row, the replica, the process or the order in which batches are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.data.example_trees import stack, unstack
from perdure.data.permutation import finalise, fold
from perdure.errors import DataError


@dataclass(frozen=True)
class Augment:
    """A random change of examples.

    Args:
        fn: `fn(example, rng)` returns the changed example; `rng` is a `numpy.random.Generator` for
            this example alone. With `batched` it is `fn(batch, keys)`: `keys` is uint32[rows, 2], the
            data of one threefry key of JAX per row (`jax.random.wrap_key_data(keys)`), and no row may
            depend on another.
        batched: whether `fn` takes whole batches.
        name: the name of the change in the recipe, by default that of the function. Change it when the
            function changes.

    An exception in `fn` becomes a `DataError` that names the example.
    """

    fn: Callable[[Any, Any], Any]
    batched: bool = False
    name: str | None = None

    def recipe(self) -> dict[str, str]:
        """The fields of a recipe. Another NumPy may draw other numbers from a Generator."""
        name = self.name or getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return {"augment": name} if self.batched else {"augment": name, "numpy": np.__version__}

    def __call__(self, batch: Any, index: npt.NDArray[np.int64], key: tuple[int, int]) -> Any:
        """The changed batch.

        `index` has the numbers of its examples (int64[rows]), and `key` is (seed, epoch).
        """
        words = example_keys(index, key)
        if self.batched:
            halves = [words[:, 0] >> np.uint64(32), words[:, 0] & np.uint64(0xFFFFFFFF)]
            try:
                return self.fn(batch, np.stack(halves, axis=-1).astype(np.uint32))
            except Exception as error:
                raise DataError(
                    f"examples {index.min()} to {index.max()}: augment failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        changed = []
        for number, word, example in zip(index, words, unstack(batch), strict=True):
            try:
                changed.append(self.fn(example, np.random.Generator(np.random.Philox(key=word))))
            except Exception as error:
                raise DataError(
                    f"example {number}: augment failed: {type(error).__name__}: {error}"
                ) from error
        return stack(changed, changed[0], lambda row: f"example {index[row]}, after augment")


def example_keys(index: npt.NDArray[np.int64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """128 bits per example, uint64[rows, 2]. Within an epoch no two examples share the first word."""
    first = finalise(np.uint64(fold(key)) ^ index.astype(np.uint64))
    second = finalise(first + np.uint64(fold((*key, 1))))
    return np.stack([first, second], axis=-1)
