"""Examples: sources that are read by index, and trees of arrays that are stacked, taken apart, hashed.

An example is an array, a number, or a dict, tuple, list or NamedTuple of examples. Invariant: all rows
of all batches have the structure, dtypes and shapes of one reference example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import blake3
import numpy as np
import numpy.typing as npt

from perdure.data.permutation import permute
from perdure.errors import DataError

WEIGHT = "weight"

FULL_BYTES = 2**30  # arrays up to this size in all are hashed whole
SAMPLED_BYTES = 2**24  # of larger arrays, at most this many bytes and rows
SAMPLED_ROWS = 4096
SAMPLED_EXAMPLES = 32  # of other sources


class ArraySource:
    """Arrays with one common leading length, in memory or mapped from files."""

    def __init__(self, arrays: Any) -> None:
        if isinstance(arrays, Mapping):
            for name in arrays:
                if not isinstance(name, str):
                    raise DataError(f"names of arrays: expected strings, found {name!r}.")
            add_weight(dict(arrays), np.ones(1, np.float32))  # refuses an entry "weight"
            named = dict(arrays)
        else:
            parts = arrays if isinstance(arrays, tuple) else (arrays,)
            named = {str(number): array for number, array in enumerate(parts)}
        self.arrays = {name: np.asarray(array) for name, array in named.items()}
        self._length = _common_length(self.arrays)
        self._container = type(arrays) if isinstance(arrays, (Mapping, tuple)) else None

    def __len__(self) -> int:
        return self._length

    def take(self, index: npt.NDArray[np.int64], epoch: int) -> Any:
        taken = {name: array[index] for name, array in self.arrays.items()}
        if self._container is None:
            return taken["0"]
        return tuple(taken.values()) if issubclass(self._container, tuple) else taken

    def fingerprint(self) -> str:
        total = sum(array.nbytes for array in self.arrays.values())
        if total <= FULL_BYTES:
            return _hashed(self.arrays)
        count = SAMPLED_BYTES * self._length // total
        count = min(max(count, SAMPLED_EXAMPLES), SAMPLED_ROWS)
        index = sample_indices(self._length, count)
        chosen = {name: array[index] for name, array in self.arrays.items()}
        return f"sampled:{self._length}:{_hashed(chosen)}"


class ExampleSource:
    """Any object with `__len__` and `__getitem__`; the methods are those of `ArraySource`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._length = _length(source)
        # Grain numbers the examples of the next epoch on from here, and draws other random numbers.
        self._stride = self._length if is_grain(source, "MapDataset") else 0
        self._reference: Any = None

    def __len__(self) -> int:
        return self._length

    def take(self, index: npt.NDArray[np.int64], epoch: int) -> Any:
        if (length := len(self._source)) != self._length:
            raise DataError(
                f"the dataset changed: it had {self._length} examples when the run began and has "
                f"{length} now. Start a new run for another dataset."
            )
        if self._reference is None:
            first = self._read(0, 0)
            self._reference = next(unstack(stack([first], first, lambda _: "example 0")))
        examples = [self._read(int(number), epoch) for number in index]
        return stack(examples, self._reference, lambda row: f"example {index[row]}")

    def fingerprint(self) -> str:
        index = sample_indices(self._length, SAMPLED_EXAMPLES)
        first, second = (_hashed(self.take(index, 0)) for _ in range(2))
        if first != second:
            raise DataError(
                f"reading examples {index.min()} to {index.max()} twice gave different bits. Take the "
                f"random changes out of the dataset; give them as augment=, which is seeded."
            )
        return f"sampled:{self._length}:{first}"

    def _read(self, number: int, epoch: int) -> Any:
        try:
            example = self._source[number + epoch * self._stride]
        except Exception as error:
            raise DataError(
                f"example {number} of {self._length} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if example is None:
            raise DataError(
                f"example {number} is None. Filter the examples before they are numbered, not in the "
                f"dataset."
            )
        return example


def as_source(source: Any) -> ArraySource | ExampleSource:
    """The source for an array or an indexable object; raises `DataError` for anything else."""
    if isinstance(source, np.ndarray):
        return ArraySource(source)
    if isinstance(source, Mapping) or not (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    ):
        raise DataError(
            f"expected an object whose __len__ and __getitem__ give an example for an index, found "
            f"{type(source).__name__}. Use ArrayDataset for arrays, StreamDataset for iterators."
        )
    return ExampleSource(source)


def is_grain(data: Any, kind: Literal["MapDataset", "IterDataset"]) -> bool:
    """Whether `data` is a Grain dataset of the class `kind`. Does not import Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(data, getattr(grain, kind))


def sample_indices(length: int, count: int) -> npt.NDArray[np.int64]:
    """At most `count` fixed indices (int64) of `length` examples, including the first and the last."""
    if length <= count:
        return np.arange(length)
    inner = permute(np.arange(count - 2), length, (0,))
    return np.unique(np.concatenate([[0, length - 1], inner]))


def _hashed(tree: Any) -> str:
    hasher = blake3.blake3()
    update_hash(hasher, tree)
    return hasher.hexdigest()


def _length(source: Any) -> int:
    try:
        length = len(source)
    except OverflowError:
        length = sys.maxsize
    if not 0 < length < sys.maxsize:
        raise DataError(
            f"the dataset is {'endless' if length else 'empty'}: expected at least 1 example, and no "
            f"repeat(), without which the steps continue into the next epoch, too."
        )
    return length


def _common_length(arrays: dict[str, npt.NDArray[Any]]) -> int:
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.hasobject:
            raise DataError(
                f"array {name!r}: expected numbers, with the examples as the first axis, found "
                f"{_describe(array)}."
            )
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len({*lengths.values()}) != 1 or 0 in lengths.values():
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(
            f"expected arrays with first axes of one length above 0, found {listed or 'none'}."
        )
    return next(iter(lengths.values()))


def stack(
    examples: Sequence[Any], reference: Any, name: Callable[[int], str], path: str = ""
) -> Any:
    """One tree of arrays over the examples, or DataError with `name(row)` if one differs."""

    def differs(row: int, expected: Any, found: Any, advice: str) -> DataError:
        return DataError(
            f"{_leaf_name(name(row), path)}: expected {_describe(expected)} as in the first example, "
            f"found {_describe(found)}. {advice}"
        )

    keys = _keys(reference)
    if keys is not None:
        for row, example in enumerate(examples):
            if type(example) is not type(reference) or set(_keys(example) or ()) != set(keys):
                raise differs(row, reference, example, "All examples must have one structure.")
        children = [
            stack([example[key] for example in examples], reference[key], name, _join(path, key))
            for key in keys
        ]
        return _rebuild(reference, children)
    first = _array(reference, _leaf_name("the first example", path))
    rows = np.empty((len(examples), *first.shape), first.dtype)
    for row, example in enumerate(examples):
        array = _array(example, _leaf_name(name(row), path))
        if array.dtype != first.dtype or array.shape != first.shape:
            advice = "Convert all examples to one dtype and shape; nothing is converted silently."
            raise differs(row, first, array, advice)
        rows[row] = array
    return rows


def _array(value: Any, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise DataError(f"{name}: {type(value).__name__} is not an array: {error}") from error
    if array.dtype.hasobject or array.dtype.kind in "SUMm":
        raise DataError(
            f"{name}: expected an array or a number, found {_describe(value)}. Convert it to numbers, "
            f"or leave it out."
        )
    return array


def unstack(batch: Any) -> Iterator[Any]:
    for row in range(len(next(leaves_with_paths(batch))[1])):
        yield map_leaves(lambda leaf, row=row: leaf[row], batch)


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    keys = _keys(tree)
    if keys is None:
        yield path, tree
        return
    for key in keys:
        yield from leaves_with_paths(tree[key], _join(path, key))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    keys = _keys(tree)
    if keys is None:
        return fn(tree)
    return _rebuild(tree, [map_leaves(fn, tree[key]) for key in keys])


def add_weight(batch: Any, weight: npt.NDArray[np.float32]) -> Any:
    """The batch with its weights: entry "weight" of a dict, last of a tuple, or (batch, weight)."""
    if isinstance(batch, dict):
        if WEIGHT in batch:
            raise DataError(
                f'the examples have an entry "{WEIGHT}", which is the name of the weights of rows in a '
                "batch. Rename the entry."
            )
        return {**batch, WEIGHT: weight}
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return (*batch, weight)
    return batch, weight


def weight_of(batch: Any) -> Any:
    return batch[WEIGHT] if isinstance(batch, dict) else batch[-1]


def update_hash(hasher: blake3.blake3, tree: Any) -> None:
    """Add path, dtype, shape and bytes of every leaf to a hash."""
    for path, leaf in sorted(leaves_with_paths(tree), key=lambda item: item[0]):
        array = np.ascontiguousarray(leaf)
        header = f"{path}\0{array.dtype.name} {array.dtype.str}\0{leaf.shape}\0".encode()
        hasher.update(len(header).to_bytes(8, "little") + header)
        # As bytes, because dtypes such as bfloat16 do not support the buffer protocol.
        hasher.update(array.reshape(-1).view(np.uint8).data)


def _keys(tree: Any) -> list[Any] | None:
    """The keys or positions of a container's children; None for a leaf."""
    if isinstance(tree, dict):
        return list(tree)
    return list(range(len(tree))) if isinstance(tree, (tuple, list)) else None


def _rebuild(tree: Any, children: list[Any]) -> Any:
    if isinstance(tree, dict):
        return dict(zip(tree, children, strict=True))
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    keys = _keys(value)
    return f"{type(value).__name__}{'' if keys is None else ' of ' + repr(keys)}"


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _leaf_name(example: str, path: str) -> str:
    return f"{example}, leaf {path}" if path else example
