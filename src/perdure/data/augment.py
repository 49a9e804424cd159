"""Random changes of examples, keyed by (seed, epoch, index).

Owns the keys. Invariant: what happens to an example depends on the seed, the epoch, its index and
nothing else: not on its batch, its row, the replica, the process or the order of asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.data.permutation import finalise, fold
from perdure.data.stacking import rows, stack
from perdure.errors import DataError


@dataclass(frozen=True)
class Augment:
    """A random change of examples.

    `fn(example, rng)` gets one example and a numpy Generator of its own. With `batched` it is
    `fn(batch, keys)`: keys are uint32[rows, 2], one for each row, which is the data of a threefry key
    of JAX (`jax.random.wrap_key_data(keys)`); it must treat each row by itself. `name` goes into the
    recipe, by default the name of the function: change it when the function changes.
    """

    fn: Callable[[Any, Any], Any]
    batched: bool = False
    name: str | None = None

    def recipe(self) -> dict[str, str]:
        """What decides the result: another numpy may draw other numbers from a Generator."""
        name = self.name or getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return {"augment": name} if self.batched else {"augment": name, "numpy": np.__version__}

    def __call__(self, batch: Any, index: npt.NDArray[np.int64], key: tuple[int, int]) -> Any:
        """`batch`, whose rows are the examples `index`; `key` is (seed, epoch)."""
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
        for number, word, example in zip(index, words, rows(batch), strict=True):
            try:
                changed.append(self.fn(example, np.random.Generator(np.random.Philox(key=word))))
            except Exception as error:
                raise DataError(
                    f"example {number}: augment failed: {type(error).__name__}: {error}"
                ) from error
        return stack(changed, changed[0], lambda row: f"example {index[row]}, after augment")


def example_keys(index: npt.NDArray[np.int64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """uint64[rows, 2], 128 bits for each example. Within an epoch no two share the first word."""
    first = finalise(np.uint64(fold(key)) ^ index.astype(np.uint64))
    second = finalise(first + np.uint64(fold((*key, 1))))
    return np.stack([first, second], axis=-1)
