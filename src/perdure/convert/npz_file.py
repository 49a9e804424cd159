"""NumPy's archive of arrays, `.npz`: written a chunk at a time, read an array at a time.

What NumPy's format cannot say of a leaf stands in the extra field of its member, which NumPy skips.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Sequence
from typing import IO, Any

import msgspec
import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.convert.formats import ForeignFile, LeafNote, NamedLeaf, noted_file
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError
from perdure.look.leaf_reader import chunks_in_order
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf, numpy_dtype

DTYPES = None
"""All of NumPy and ml_dtypes."""

_END = ".npy"
_NOTE_ID = b"PD"
_MAX_NAME, _MAX_NOTE = 65_535, 65_000
"""The most bytes of the name of a member, and of the note on it."""


def can_hold(value: Any) -> bool:
    """Whether a Python scalar has an exact form in an array."""
    if isinstance(value, bytes):
        return True
    array = np.asarray(value)
    same = array.dtype != object and array.item() == value
    return same or (array.dtype.kind in "fc" and repr(array.item()) == repr(value))


def write(
    path: str,
    checkpoint: StoredCheckpoint,
    arrays: Sequence[NamedLeaf],
    scalars: Sequence[NamedLeaf],
) -> None:
    """Write arrays, and Python scalars as arrays without axes.

    The dtypes of ml_dtypes are written as NumPy does, as raw elements (`|V2`):
    `array.view(ml_dtypes.bfloat16)`.
    """
    _refuse_names([*arrays, *scalars])
    chunks_of = chunks_in_order(checkpoint, [leaf.entry for leaf in arrays])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for leaf in arrays:
            dtype, note = numpy_dtype(leaf.dtype), leaf.note
            if _is_raw(dtype):
                note = LeafNote(note.dtype or leaf.dtype, note.path)
                dtype = np.dtype(f"V{dtype.itemsize}")
            _add(archive, leaf.name, dtype, leaf.shape, chunks_of(leaf.entry), note)
        for leaf in scalars:
            value = leaf.value
            array = np.frombuffer(value, "u1") if isinstance(value, bytes) else np.asarray(value)
            note = LeafNote(leaf.dtype, leaf.note.path)
            _add(archive, leaf.name, array.dtype, array.shape, [array.tobytes()], note)


def _refuse_names(leaves: Sequence[NamedLeaf]) -> None:
    """Raise `ArgumentError` for names that an archive cannot have, or that `numpy.load` confuses."""
    names = {leaf.name for leaf in leaves}
    for leaf in leaves:
        name = leaf.name
        shown = repr(name if len(name) <= 80 else f"{name[:80]}...")
        if len(f"{name}{_END}".encode()) > _MAX_NAME:
            wrong = f"its name {shown} is longer than the {_MAX_NAME} bytes that an archive holds"
        elif "\0" in name:
            wrong = f"its name {shown} has a NUL, at which the names of an archive end"
        elif name.endswith(_END) and name.removesuffix(_END) in names:
            wrong = f"numpy.load takes its name {shown} for that of {name.removesuffix(_END)!r}"
        elif len(msgspec.json.encode(leaf.note)) > _MAX_NOTE:
            wrong = "its path is too long for an archive"
        else:
            continue
        raise ArgumentError(
            f"leaf {leaf.entry.path[:80]!r}: {wrong}; give it another name: `--names`."
        )


def _add(
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    parts: Iterable[bytes | memoryview],
    note: LeafNote,
) -> None:
    info = zipfile.ZipInfo(f"{name}{_END}")  # of 1980-01-01
    if note != LeafNote():
        data = msgspec.json.encode(note)
        info.extra = _NOTE_ID + len(data).to_bytes(2, "little") + data
    with archive.open(info, "w", force_zip64=True) as member:
        fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, fields)
        for part in parts:
            member.write(part)


def read(path: str) -> ForeignFile:
    """The arrays of an archive, in memory; raises `DataError` for another file."""
    leaves: dict[str, Leaf] = {}
    notes: dict[str, LeafNote] = {}
    member = ""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                member = f"{info.filename!r}: "
                name = info.filename.removesuffix(_END)
                if name in leaves:
                    raise ValueError("there are two arrays of this name")
                notes[name] = _note_of(info)
                with archive.open(info) as file:
                    leaves[name] = _leaf(file, notes[name].dtype)
        member = ""
        return noted_file(leaves, notes)
    except Exception as error:  # the header of a member is read by NumPy, and can be anything
        raise DataError(
            f"{path}: not a .npz archive that can be read: {member}{str(error).rstrip('.')}."
        ) from error


def _note_of(info: zipfile.ZipInfo) -> LeafNote:
    """The note on a member."""
    extra = info.extra
    while len(extra) >= 4:
        end = 4 + int.from_bytes(extra[2:4], "little")
        if extra[:2] == _NOTE_ID:
            return msgspec.json.decode(extra[4:end], type=LeafNote)
        extra = extra[end:]
    return LeafNote()


def _leaf(file: IO[bytes], note: str | None) -> Leaf:
    """The leaf of a member, whose checksum is compared when it has been read to its end."""
    version = np.lib.format.read_magic(file)
    is_first = version == (1, 0)
    headers = np.lib.format
    read_header = headers.read_array_header_1_0 if is_first else headers.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    kinds = "biufcV" if shape or dtype.kind != "U" else "U"
    if dtype.kind not in kinds or dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(
            f"an array of dtype {dtype} cannot be a leaf; expected booleans or numbers, or one string. "
            f"Convert it, or write the archive without it"
        )
    data = file.read()
    nbytes = math.prod(shape) * dtype.itemsize
    if len(data) != nbytes or min(shape, default=0) < 0:
        raise ValueError(
            f"its header says {dtype}{list(shape)} of {nbytes} bytes, and it has {len(data)}"
        )
    if dtype.kind == "U":
        return scalar_leaf(str(np.frombuffer(data, dtype)[0]) if dtype.itemsize else "")
    if dtype.kind == "V":
        dtype = _noted_dtype(dtype, note)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, order="F" if fortran else "C")
    if note is None or not note.startswith("py:"):
        return array_leaf(array)
    return scalar_leaf(array.tobytes() if note == "py:bytes" else array.item())


def _noted_dtype(raw: np.dtype[Any], note: str | None) -> np.dtype[Any]:
    """The dtype of raw elements, which only the note on a member of an export says."""
    if note is not None:
        dtype = numpy_dtype(note.removeprefix(WEAK_PREFIX))
        if _is_raw(dtype) and dtype.itemsize == raw.itemsize:
            return dtype
    raise UnsupportedLeafError(
        f"its elements are raw ({raw.str}), and nothing says what they are. Arrays of ml_dtypes, such "
        f"as bfloat16, are exact as safetensors; as .npz write array.astype('float32')"
    )


def _is_raw(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of ml_dtypes, for which NumPy's format has no name."""
    return dtype.type.__module__ != "numpy"
