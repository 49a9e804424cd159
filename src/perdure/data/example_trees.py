"""Examples as trees of arrays: stacked into batches, taken apart again, hashed.

An example is an array, a number, or a dict, tuple, list or NamedTuple of examples. Invariant: all rows
of all batches have the structure, dtypes and shapes of one reference example, so that a dtype never
depends on which examples share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from perdure.errors import DataError

WEIGHT = "weight"


def stack(
    examples: Sequence[Any], reference: Any, name: Callable[[int], str], path: str = ""
) -> Any:
    """One tree of arrays with a leading axis over the examples.

    Args:
        examples: one example per row.
        reference: the example whose structure, dtypes and shapes all others must have.
        name: returns a name for the example of a row, for errors.
        path: that of the examples in a larger tree.

    Raises:
        DataError: an example differs from the reference, or has a leaf that is no array or number. The
            message names the example and the leaf.
    """

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
    """A leaf of an example as an array of numbers; `name` is its name in errors."""
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
    """The examples of a batch, as views."""
    for row in range(len(next(leaves_with_paths(batch))[1])):
        yield map_leaves(lambda leaf, row=row: leaf[row], batch)


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its path."""
    keys = _keys(tree)
    if keys is None:
        yield path, tree
        return
    for key in keys:
        yield from leaves_with_paths(tree[key], _join(path, key))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with the same containers and the results of `fn` for its leaves."""
    keys = _keys(tree)
    if keys is None:
        return fn(tree)
    return _rebuild(tree, [map_leaves(fn, tree[key]) for key in keys])


def add_weight(batch: Any, weight: npt.NDArray[np.float32]) -> Any:
    """The batch with the weights of its rows.

    They become the entry "weight" of a dict and the last member of a tuple or list; anything else
    becomes the pair (batch, weight).

    Raises:
        DataError: a dict has an entry "weight" already.
    """
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
    """The weights that `add_weight` has added to a batch."""
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
    """A container of the class of `tree` with new children."""
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
