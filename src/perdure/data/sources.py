"""Where examples come from when they are addressed by index.

Owns the step from indices to stacked rows, and the fingerprint of what is behind them. Invariant:
`take` is a function of its arguments; the length does not change while a dataset uses the source.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from perdure.data.permutation import permute
from perdure.data.pipelines import is_grain
from perdure.data.stacking import digest, rows, stack, with_weight
from perdure.errors import DataError

# Up to this size every byte is hashed at the start of a run, which takes a fraction of a second.
FULL_BYTES = 2**30
# Above it, and for objects whose examples are made when asked for, a fixed choice of examples is.
SAMPLED_BYTES = 2**24
SAMPLED_ROWS = 4096
SAMPLED_EXAMPLES = 32


class Source(Protocol):
    """Examples by index."""

    def __len__(self) -> int: ...

    def take(self, index: npt.NDArray[np.int64], epoch: int) -> Any:
        """The examples `index`, stacked, in memory of their own."""
        ...

    def fingerprint(self) -> str:
        """What tells these examples from others, without reading 100 GB."""
        ...


class Arrays:
    """Arrays with one common leading length, in memory or mapped from files."""

    def __init__(self, arrays: Any) -> None:
        self.named = _named(arrays)
        self._length = _common_length(self.named)
        self._kind = type(arrays) if isinstance(arrays, (Mapping, tuple)) else None

    def __len__(self) -> int:
        return self._length

    def take(self, index: npt.NDArray[np.int64], epoch: int) -> Any:
        taken = {name: array[index] for name, array in self.named.items()}
        if self._kind is None:
            return taken["0"]
        return tuple(taken.values()) if issubclass(self._kind, tuple) else taken

    def fingerprint(self) -> str:
        total = sum(array.nbytes for array in self.named.values())
        if total <= FULL_BYTES:
            return _hashed(self.named)
        count = SAMPLED_BYTES * self._length // total
        count = min(max(count, SAMPLED_EXAMPLES), SAMPLED_ROWS)
        index = sample(self._length, count)
        chosen = {name: array[index] for name, array in self.named.items()}
        return f"sampled:{self._length}:{_hashed(chosen)}"


class Examples:
    """Any object with `__len__` and `__getitem__`; an example is a tree of arrays and numbers."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._length = _length(source)
        # Grain numbers the examples of the next epoch on from the last, and draws anew for them.
        self._stride = self._length if is_grain(source, "MapDataset") else 0
        self._reference: Any = None

    def __len__(self) -> int:
        return self._length

    def take(self, index: npt.NDArray[np.int64], epoch: int) -> Any:
        if (now := len(self._source)) != self._length:
            raise DataError(
                f"the dataset changed: it had {self._length} examples when the run began and has "
                f"{now} now. A run needs one unchanged dataset; start again for a new one."
            )
        if self._reference is None:
            first = self._read(0, 0)
            self._reference = next(rows(stack([first], first, lambda _: "example 0")))
        examples = [self._read(int(number), epoch) for number in index]
        return stack(examples, self._reference, lambda row: f"example {index[row]}")

    def fingerprint(self) -> str:
        index = sample(self._length, SAMPLED_EXAMPLES)
        once, again = (_hashed(self.take(index, 0)) for _ in range(2))
        if once != again:
            raise DataError(
                f"reading examples {index.min()} to {index.max()} twice gave different bits, so no run "
                f"can be repeated. Take random changes out of the dataset and give them as augment=, "
                f"where they are keyed by seed, epoch and index."
            )
        return f"sampled:{self._length}:{once}"

    def _read(self, number: int, epoch: int) -> Any:
        try:
            example = self._source[number + epoch * self._stride]
        except Exception as error:
            raise DataError(
                f"example {number} of {self._length} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if example is None:
            raise DataError(
                f"example {number} is None. If the dataset is filtered, leave out what it drops before "
                f"examples are numbered."
            )
        return example


def as_source(source: Any) -> Source:
    """Arrays are indexed at once; everything else example by example. Raises DataError."""
    if isinstance(source, np.ndarray):
        return Arrays(source)
    if isinstance(source, Mapping) or not (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    ):
        raise DataError(
            f"expected an object whose __len__ and __getitem__ give an example for an index, found "
            f"{type(source).__name__}. Use ArrayDataset for arrays, StreamDataset for iterators."
        )
    return Examples(source)


def sample(length: int, count: int) -> npt.NDArray[np.int64]:
    """A fixed choice of indices, the first and the last among them."""
    if length <= count:
        return np.arange(length)
    inner = permute(np.arange(count - 2), length, (0,))
    return np.unique(np.concatenate([[0, length - 1], inner]))


def _hashed(tree: Any) -> str:
    into = blake3.blake3()
    digest(tree, into)
    return into.hexdigest()


def _length(source: Any) -> int:
    try:
        length = len(source)
    except OverflowError:
        length = sys.maxsize
    if length == 0:
        raise DataError("the dataset is empty: expected at least 1 example")
    if length >= sys.maxsize:
        raise DataError(
            "the dataset is endless (its length is the largest there is), so it has no epochs. Leave "
            "out its repeat(): steps go on into the next epoch by themselves."
        )
    return length


def _named(arrays: Any) -> dict[str, npt.NDArray[Any]]:
    if isinstance(arrays, Mapping):
        for name in arrays:
            if not isinstance(name, str):
                raise DataError(f"names of arrays must be strings, found {name!r}")
        with_weight(dict(arrays), np.ones(1, np.float32))
        named = dict(arrays)
    elif isinstance(arrays, tuple):
        named = {str(i): array for i, array in enumerate(arrays)}
    else:
        named = {"0": arrays}
    return {name: np.asarray(array) for name, array in named.items()}


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
