"""Examples as trees of arrays: stacked into batches, taken apart again, hashed.

Owns what an example may be: a dict, tuple, list or NamedTuple of such, around arrays and numbers.
Invariant: all rows of all batches have the structure, dtypes and shapes of one reference example, so
that which examples share a batch never decides a dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from perdure.errors import DataError

WEIGHT = "weight"


def stack(examples: Sequence[Any], reference: Any, name: Callable[[int], str]) -> Any:
    """One tree of arrays with a leading axis over the examples, in the form of `reference`.

    `name` says which example a row is, for errors. Raises DataError that names the example
    and its leaf where structure, dtype or shape differ from the reference.
    """
    return _stack(list(examples), reference, name, "")


def _stack(examples: list[Any], reference: Any, name: Callable[[int], str], path: str) -> Any:
    keys = _keys(reference)
    if keys is not None:
        for row, example in enumerate(examples):
            if type(example) is not type(reference) or set(_keys(example) or ()) != set(keys):
                raise DataError(
                    f"{name(row)}{_at(path)}: expected {_form(reference)} as in the first example, "
                    f"found {_form(example)}. All examples must have one structure."
                )
        return _like(
            reference,
            [_stack([e[k] for e in examples], reference[k], name, _join(path, k)) for k in keys],
        )
    first = _array(reference, lambda _: "the first example", 0, path)
    rows = np.empty((len(examples), *first.shape), first.dtype)
    for row, example in enumerate(examples):
        array = _array(example, name, row, path)
        if array.dtype != first.dtype or array.shape != first.shape:
            raise DataError(
                f"{name(row)}{_at(path)}: expected {_form(first)} as in the first example, found "
                f"{_form(array)}. Bring all examples to one dtype and shape; nothing is cropped or "
                f"converted silently."
            )
        rows[row] = array
    return rows


def _array(value: Any, name: Callable[[int], str], row: int, path: str) -> npt.NDArray[Any]:
    """A leaf of an example as an array of numbers."""
    try:
        array = np.asarray(value)
    except Exception as error:
        raise DataError(
            f"{name(row)}{_at(path)}: {type(value).__name__} is no array: {error}"
        ) from error
    if array.dtype.hasobject or array.dtype.kind in "SUMm":
        raise DataError(
            f"{name(row)}{_at(path)}: expected an array or a number, found {_form(value)}. Turn it "
            f"into numbers, or leave it out."
        )
    return array


def rows(tree: Any) -> Iterator[Any]:
    """The examples of a stacked tree, as views."""
    for row in range(len(next(leaves(tree))[1])):
        yield transform(lambda leaf, row=row: leaf[row], tree)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path."""
    keys = _keys(tree)
    if keys is None:
        yield path, tree
        return
    for key in keys:
        yield from leaves(tree[key], _join(path, key))


def transform(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`fn` of every leaf, in the same containers."""
    keys = _keys(tree)
    if keys is None:
        return fn(tree)
    return _like(tree, [transform(fn, tree[key]) for key in keys])


def with_weight(batch: Any, weight: npt.NDArray[np.float32]) -> Any:
    """The batch with its weights: an entry of a dict, a last member of a tuple or list, or a pair."""
    if isinstance(batch, dict):
        if WEIGHT in batch:
            raise DataError(
                f'the examples have an entry "{WEIGHT}", the name under which a batch carries the '
                "weights that mark padding; rename the entry"
            )
        return {**batch, WEIGHT: weight}
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return (*batch, weight)
    return batch, weight


def digest(tree: Any, into: blake3.blake3) -> None:
    """Name, dtype, shape and bytes of every leaf."""
    for path, leaf in sorted(leaves(tree), key=lambda item: item[0]):
        array = np.ascontiguousarray(leaf)
        header = f"{path}\0{array.dtype.name} {array.dtype.str}\0{leaf.shape}\0".encode()
        into.update(len(header).to_bytes(8, "little") + header)
        # As bytes, because dtypes such as bfloat16 do not offer the buffer protocol.
        into.update(array.reshape(-1).view(np.uint8).data)


def _keys(tree: Any) -> list[Any] | None:
    if isinstance(tree, dict):
        return list(tree)
    return list(range(len(tree))) if isinstance(tree, (tuple, list)) else None


def _like(tree: Any, children: list[Any]) -> Any:
    if isinstance(tree, dict):
        return dict(zip(tree, children, strict=True))
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def _form(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    keys = _keys(value)
    return f"{type(value).__name__}{'' if keys is None else ' of ' + repr(keys)}"


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _at(path: str) -> str:
    return f", leaf {path}" if path else ""
