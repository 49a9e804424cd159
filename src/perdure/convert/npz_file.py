"""NumPy's archive of arrays, `.npz`: written a chunk at a time, read an array at a time.

What NumPy's format cannot say of a leaf, and Python scalars, are notes in a member of their own.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.convert import formats
from perdure.errors import ArgumentError, DataError
from perdure.look.leaf_reader import chunks_in_order
from perdure.state.leaf_values import array_leaf
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf, numpy_dtype

DTYPES = None
"""All of NumPy and ml_dtypes."""

_END = ".npy"
_NOTES = "perdure.json"


def write(
    path: str,
    checkpoint: StoredCheckpoint,
    arrays: Sequence[formats.NamedLeaf],
    scalars: Sequence[formats.NamedLeaf],
) -> None:
    """Write arrays; those of ml_dtypes as NumPy does, as raw elements: `array.view(bfloat16)`."""
    names = {leaf.name for leaf in arrays}
    for leaf in arrays:
        stem = leaf.name.removesuffix(_END)
        # NumPy confuses `a` and `a.npy`; zipfile cuts a name at NUL.
        if (
            len(leaf.name.encode()) > 65_000
            or "\0" in leaf.name
            or (stem != leaf.name and stem in names)
            or leaf.name == _NOTES
        ):
            raise ArgumentError(
                f"leaf {leaf.entry.path[:80]!r}: expected a name of at most 65,000 bytes without NUL, "
                f"not that of another array with {_END} and not {_NOTES}, found {leaf.name[:80]!r}; "
                f"give it another name: `--names`."
            )
    chunks_of = chunks_in_order(checkpoint, [leaf.entry for leaf in arrays])
    notes = formats.text_notes(scalars)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for leaf in arrays:
            dtype, note = numpy_dtype(leaf.dtype), leaf.note
            if _is_raw(dtype):
                note = formats.LeafNote(note.dtype or leaf.dtype, note.path)
                dtype = np.dtype(f"V{dtype.itemsize}")
            notes[leaf.name] = note
            info = zipfile.ZipInfo(f"{leaf.name}{_END}")  # of 1980-01-01
            with archive.open(info, "w", force_zip64=True) as member:
                fields = {"descr": dtype.str, "fortran_order": False, "shape": leaf.shape}
                np.lib.format.write_array_header_1_0(member, fields)
                for part in chunks_of(leaf.entry):
                    member.write(part)
    formats.add_notes(path, _NOTES, notes)


def read(path: str) -> formats.ForeignFile:
    """The arrays of an archive, in memory; raises `DataError` for another file."""
    leaves: dict[str, Leaf] = {}
    member = ""
    try:
        notes = formats.read_notes(path, _NOTES)
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = member.removesuffix(_END)
                if member == _NOTES:
                    continue
                if name in leaves:
                    raise ValueError("there are two arrays of this name")
                with archive.open(member) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
                    if file.read():  # to the end, so that the checksum is compared
                        raise ValueError("it has more bytes than its header says")
                leaves[name] = array_leaf(_known(array, notes.get(name, formats.LeafNote()).dtype))
        member = _NOTES
        return formats.noted_file(leaves, notes)
    except Exception as error:  # the header of a member is read by NumPy, and can be anything
        raise DataError(
            f"{path}: not a .npz archive that can be read: {f'{member!r}: ' if member else ''}"
            f"{str(error).rstrip('.')}."
        ) from error


def _known(array: np.ndarray[Any, Any], note: str | None) -> np.ndarray[Any, Any]:
    """The array of a member; raw elements get the dtype of ml_dtypes that the note says."""
    if array.dtype.kind in "biufc":
        return array
    if array.dtype.kind == "V" and array.dtype.names is None and note is not None:
        dtype = numpy_dtype(note.removeprefix(WEAK_PREFIX))
        if _is_raw(dtype) and dtype.itemsize == array.dtype.itemsize:
            return array.view(dtype)
    raise ValueError(
        f"an array of dtype {array.dtype} ({array.dtype.str}) cannot be a leaf; expected booleans or "
        f"numbers. Write bfloat16 and its like as safetensors, or as float32"
    )


def _is_raw(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__ != "numpy"
