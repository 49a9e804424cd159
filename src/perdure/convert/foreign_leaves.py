"""Leaves as files of other tools hold them: arrays of plain dtypes, and notes on all else.

Invariant: a leaf of a `ForeignFile` can be saved and restored; its bytes are as many as its shape says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from perdure.errors import UnsupportedLeafError
from perdure.look.leaf_reader import KEY_PREFIX, ChunksOf, element_shape, scalar_value
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


class NamedLeaf(NamedTuple):
    """A leaf of a checkpoint, and its name in a file.

    Attributes:
        name: Its name.
        entry: The leaf.
        noted_path: Its path inside the branch, if the name would be imported as another path. The file
            notes it, if its format can.
    """

    name: str
    entry: LeafEntry
    noted_path: str | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the elements of an array leaf: a NumPy or ml_dtypes name."""
        if self.entry.dtype.startswith(KEY_PREFIX):
            return "uint32"
        return self.entry.dtype.removeprefix(WEAK_PREFIX)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array leaf; that of random keys ends in the words of one key."""
        return element_shape(self.entry)

    @property
    def note(self) -> LeafNote:
        """What is noted of an array leaf: the dtype if that is a weak type or one of keys."""
        dtype = self.entry.dtype
        return LeafNote(dtype if self.dtype != dtype else None, self.noted_path)


Reader = Callable[[Sequence[NamedLeaf]], ChunksOf]
"""Begins to read leaves; what it returns yields the bytes of a leaf, and is called in their order."""

Scalars = Sequence[tuple[NamedLeaf, Any]]
"""Leaves that are Python scalars, with their values."""


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
