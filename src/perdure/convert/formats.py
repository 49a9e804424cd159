"""The formats of other tools: a module for each, and leaves as their files hold them.

A module has `DTYPES` (None for all of NumPy and ml_dtypes), `can_hold` for Python scalars, `write` and
`read`. Invariant: a leaf of a `ForeignFile` can be saved and restored; its bytes are as many as its
shape says.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from perdure.errors import ArgumentError, DataError, UnsupportedLeafError
from perdure.look.leaf_reader import KEY_PREFIX, scalar_value
from perdure.store.format import WEAK_PREFIX, escape, unescape
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry
from perdure.store.manifest_json import MAX_DIMENSIONS, item_bytes

_MODULES = {
    "safetensors": "safetensors_files",
    "torch": "torch_file",
    "npz": "npz_file",
    "orbax": "orbax_folder",
}

ARRAY_FORMATS = tuple(_MODULES)
"""The formats of arrays, which are read and written without the code of a model."""

MODEL_FORMATS = ("keras", "saved_model", "onnx", "jax_export")
"""The formats that need the code of the model, and are only written."""

_ENDS = {".safetensors": "safetensors", ".npz": "npz"}
_ENDS |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")


class LeafNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file of another tool cannot say of a leaf: its dtype (and text), its path in the
    branch.
    """

    dtype: str | None = None
    path: str | None = None


class ForeignFile(NamedTuple):
    """What a file of another tool holds: leaves by name, and the paths that it notes for some."""

    leaves: dict[str, Leaf]
    paths: dict[str, str]


class NamedLeaf(NamedTuple):
    """A leaf of a checkpoint, and how a file has it; random keys end in the words of one key.

    `note`: the path inside the branch, if the name means another one, and a weak dtype or one of
    keys.
    """

    name: str
    entry: LeafEntry
    dtype: str
    shape: tuple[int, ...]
    note: LeafNote
    value: Any = None


def format_module(kind: str) -> Any:
    """The module of a format; few programs need more than one."""
    return import_module(f"perdure.convert.{_MODULES[kind]}")


def read_foreign(path: str, kind: str) -> ForeignFile:
    """The arrays and scalars of a file or folder, mapped where the format allows it.

    Raises DataError if it holds what cannot be a leaf, ArgumentError for a name twice,
    MissingExtraError.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: expected a file or folder, found a pipe or a device.")
    return format_module(kind).read(path)


def kind_of(path: str) -> str:
    """The format of a file or folder; DataError if there is nothing, ArgumentError if unknown."""
    if os.path.isdir(path):
        names = os.listdir(path)
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return "safetensors"
        if "_METADATA" in names or "_CHECKPOINT_METADATA" in names:
            return "orbax"
    elif not os.path.exists(path):
        raise DataError(f"{path}: expected a file or folder, found nothing.")
    elif kind := _ENDS.get(os.path.splitext(path)[1]):
        return kind
    raise ArgumentError(
        f"{path}: its format is not known from its name; name it: one of {', '.join(ARRAY_FORMATS)}."
    )


def noted_file(leaves: dict[str, Leaf], notes: Mapping[str, LeafNote]) -> ForeignFile:
    """The leaves of a file that were written as `leaves`; `ValueError` if a note or a leaf does not
    fit.
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
