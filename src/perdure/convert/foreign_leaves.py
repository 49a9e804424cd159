"""Leaves as files of other tools hold them: arrays of plain dtypes, and notes on all else.

Invariant: a leaf of a `ForeignFile` can be saved and restored; its bytes are as many as its shape says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from perdure.checkpoint.address import StoredCheckpoint
from perdure.convert.leaf_names import NamedLeaf
from perdure.errors import UnsupportedLeafError
from perdure.look.leaf_reader import KEY_PREFIX, chunks_in_order, element_shape, scalar_value
from perdure.store.format import WEAK_PREFIX, escape, unescape
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry
from perdure.store.manifest_check import MAX_DIMENSIONS, item_bytes


class LeafNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file of another tool cannot say of a leaf, noted in it by an export.

    Attributes:
        dtype: The dtype of the leaf; of a scalar that the file has nowhere else also its text.
        path: The path of the leaf inside the exported branch.
    """

    dtype: str | None = None
    path: str | None = None


class ForeignFile(NamedTuple):
    """What a file of another tool holds.

    Attributes:
        leaves: Its arrays and scalars by name.
        paths: The paths that it notes for some of the names.
    """

    leaves: dict[str, Leaf]
    paths: dict[str, str]


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
        for name, entry, _ in leaves
    ]


def plain_dtype(entry: LeafEntry) -> str:
    """The dtype of the elements of an array leaf."""
    if entry.dtype.startswith(KEY_PREFIX):
        return "uint32"
    return entry.dtype.removeprefix(WEAK_PREFIX)


def note_of(leaf: NamedLeaf) -> LeafNote:
    """The note on an array leaf: the dtype if that is a weak type or one of keys."""
    dtype = leaf.entry.dtype
    return LeafNote(dtype if plain_dtype(leaf.entry) != dtype else None, leaf.noted_path)


def noted_file(leaves: dict[str, Leaf], notes: Mapping[str, LeafNote]) -> ForeignFile:
    """The leaves of a file that were written as `leaves` with these notes by name.

    Raises `ValueError` if a note does not fit, or a leaf could not be restored from a checkpoint.
    """
    paths: dict[str, str] = {}
    for name, note in notes.items():
        if note.dtype is not None:
            leaves[name] = _noted_leaf(leaves.get(name), note.dtype)
        if name not in leaves:
            raise ValueError(f"it has a note on {name!r}, and no such array")
        if note.path is not None:
            parts = note.path.split("/")
            if not all(parts) or [escape(unescape(part)) for part in parts] != parts:
                raise ValueError(f"the note {note.path!r} on {name!r} is no path")
            paths[name] = note.path
    for name, leaf in leaves.items():
        _check_leaf(name, leaf)
    return ForeignFile(leaves, paths)


def _check_leaf(name: str, leaf: Leaf) -> None:
    if leaf.is_scalar:
        return
    if len(leaf.shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"{name!r} has {len(leaf.shape)} axes, and a leaf at most {MAX_DIMENSIONS}; reshape it"
        )
    count, item = math.prod(leaf.shape), item_bytes(leaf.dtype)
    if leaf.dtype.startswith(KEY_PREFIX):  # the number of words of a key is what its bytes say
        fits = count == 0 or leaf.nbytes > 0
    else:
        fits = item is not None and count * item == leaf.nbytes
    if not fits or min(leaf.shape, default=0) < 0:
        raise ValueError(f"{name!r} is said to be {leaf.describe()}, and has {leaf.nbytes} bytes")


def _noted_leaf(array: Leaf | None, note: str) -> Leaf:
    """The leaf that was written as `array` with a note on its dtype, or with the note alone."""
    if array is None:
        dtype, _, text = note.partition(" ")
        if _is_exact_text(dtype, text):
            return Leaf(dtype, (), memoryview(text.encode()), frozen=True)
    elif note == array.dtype:
        return array
    elif note == WEAK_PREFIX + array.dtype:
        return Leaf(note, array.shape, array.data, frozen=True)
    elif re.fullmatch(f"{KEY_PREFIX}[^<>]+>", note) and array.dtype == "uint32" and array.shape:
        return Leaf(note, array.shape[:-1], array.data, frozen=True)
    raise ValueError(f"the note {note[:80]!r} does not fit what it is about")


def _is_exact_text(dtype: str, text: str) -> bool:
    """Whether a text is the one by which a checkpoint stores a Python scalar."""
    from perdure.state.leaf_values import scalar_text  # takes long to import

    if dtype == "py:int" and not re.fullmatch("-?[0-9]+", text):
        return False  # an exponent could stand for more digits than memory holds
    with suppress(UnsupportedLeafError, ValueError):
        return scalar_text(scalar_value(LeafEntry("", dtype, text=text))) == (dtype, text)
    return False
