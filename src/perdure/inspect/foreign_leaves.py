"""Leaves as files of other tools hold them: arrays of plain dtypes, and notes on all else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from perdure.errors import UnsupportedLeafError
from perdure.inspect.address import StoredCheckpoint
from perdure.inspect.leaf_chunks import chunks_in_order
from perdure.inspect.leaf_names import NamedLeaf
from perdure.inspect.leaf_reader import KEY_PREFIX, element_shape, scalar_value
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry

MARK = "perdure:"
"""Begins the name of a note in a file."""


class ForeignLeaf(NamedTuple):
    """An array that is being written to a file of another tool.

    Attributes:
        name: Its name in the file.
        dtype: A NumPy or ml_dtypes name.
        shape: Its shape; that of random keys ends in the words of one key.
        nbytes: Its bytes.
        chunks: Yields the bytes in parts.
        entry: The leaf of the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[memoryview]]
    entry: LeafEntry


def foreign_leaves(checkpoint: StoredCheckpoint, leaves: Sequence[NamedLeaf]) -> list[ForeignLeaf]:
    """Array leaves without what only perdure knows: a weak type, or that `uint32` words are keys.

    Their chunks have to be asked for in this order.
    """
    chunks_of = chunks_in_order(checkpoint, [leaf.entry for leaf in leaves])
    return [
        ForeignLeaf(
            name,
            plain_dtype(entry),
            element_shape(entry),
            entry.nbytes,
            partial(chunks_of, entry),
            entry,
        )
        for name, entry in leaves
    ]


def plain_dtype(entry: LeafEntry) -> str:
    """The dtype of the elements of an array leaf."""
    if entry.dtype.startswith(KEY_PREFIX):
        return "uint32"
    return entry.dtype.removeprefix(WEAK_PREFIX)


def note_of(entry: LeafEntry) -> str | None:
    """What a file cannot say of a leaf: the type and text of a scalar, a weak type, or that of keys."""
    if entry.text is not None:
        return f"{entry.dtype} {entry.text}"
    return entry.dtype if plain_dtype(entry) != entry.dtype else None


def noted_leaf(array: Leaf | None, note: str | None) -> Leaf:
    """The leaf that was written as `array` with a note, or with a note alone.

    Raises `ValueError` if the two do not fit together.
    """
    if array is None:
        dtype, _, text = (note or "").partition(" ")
        with suppress(UnsupportedLeafError):
            scalar_value(LeafEntry("", dtype, text=text))  # raises for a text that means nothing
            return Leaf(dtype, (), memoryview(text.encode()), frozen=True)
    elif note is None:
        return array
    elif note == WEAK_PREFIX + array.dtype:
        return Leaf(note, array.shape, array.data, frozen=True)
    elif re.fullmatch(f"{KEY_PREFIX}[^<>]+>", note) and array.dtype == "uint32" and array.shape:
        return Leaf(note, array.shape[:-1], array.data, frozen=True)
    raise ValueError(f"the note {note!r} does not fit what it is about")
