"""NumPy's archive of arrays, `.npz`, written and read a chunk at a time.

What NumPy's format cannot say of a leaf stands in a note on its member, which NumPy skips.
"""

from __future__ import annotations

import io
import math
import mmap
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from perdure.convert.foreign_leaves import ForeignFile, ForeignLeaf, LeafNote, noted_file
from perdure.convert.leaf_names import NamedLeaf
from perdure.convert.stored_zip import MAX_NAME, MAX_NOTE, StoredZip, read_note
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store.dtypes import numpy_dtype
from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf
from perdure.store.manifest_check import MAX_DIMENSIONS

_END = ".npy"


def can_hold(value: Any) -> bool:
    """Whether a Python scalar has an exact form in an array."""
    if isinstance(value, bytes):
        return True
    array = np.asarray(value)
    same = array.dtype != object and array.item() == value
    return same or (array.dtype.kind in "fc" and repr(array.item()) == repr(value))


def refuse_names(leaves: Sequence[NamedLeaf]) -> None:
    """Raise `ArgumentError` for names that an archive cannot have, or that `numpy.load` confuses."""
    names = {leaf.name for leaf in leaves}
    for name, entry, _ in leaves:
        shown = repr(name if len(name) <= 80 else f"{name[:80]}...")
        if len(f"{name}{_END}".encode()) > MAX_NAME:
            wrong = f"its name {shown} is longer than the {MAX_NAME} bytes that an archive holds"
        elif "\0" in name:
            wrong = f"its name {shown} has a NUL, at which the names of an archive end"
        elif name.endswith(_END) and name.removesuffix(_END) in names:
            wrong = f"numpy.load takes its name {shown} for that of {name.removesuffix(_END)!r}"
        else:
            continue
        raise ArgumentError(f"leaf {entry.path[:80]!r}: {wrong}; give it another name: `--names`.")


def write_npz(
    file: BinaryIO,
    leaves: Sequence[ForeignLeaf],
    scalars: Sequence[tuple[str, Any]],
    notes: dict[str, LeafNote],
) -> None:
    """Write arrays, and Python scalars as arrays without axes.

    bfloat16 and the other dtypes of ml_dtypes are written as NumPy writes them, as raw elements
    (`|V2`): `array.view(ml_dtypes.bfloat16)` gives them back.

    Args:
        file: Where to.
        leaves: The arrays in the order in which they are read.
        scalars: Scalars that `can_hold` accepts, by name.
        notes: Notes by name, apart from those on raw elements and on the types of scalars.
    """
    with StoredZip(file) as archive:
        for leaf in leaves:
            dtype, note = numpy_dtype(leaf.dtype), notes[leaf.name]
            if _is_raw(dtype):
                note = LeafNote(note.dtype or leaf.dtype, note.path)
            parts = _joined(_header(dtype, leaf.shape), leaf.chunks())
            archive.add(f"{leaf.name}{_END}", parts, _encoded(note))
        for name, value in scalars:
            array = (
                np.asarray(value) if not isinstance(value, bytes) else np.frombuffer(value, "u1")
            )
            note = LeafNote(scalar_leaf(value).dtype, notes[name].path)
            parts = [_header(array.dtype, array.shape), array.tobytes()]
            archive.add(f"{name}{_END}", parts, _encoded(note))


def _encoded(note: LeafNote) -> bytes:
    data = b"" if note == LeafNote() else msgspec.json.encode(note)
    if len(data) > MAX_NOTE:
        raise ArgumentError(
            f"leaf {(note.path or '')[:80]!r}: its path is too long for an archive; give it another "
            f"name: `--names`."
        )
    return data


def read_npz(path: str) -> ForeignFile:
    """The arrays of an archive of uncompressed members; raises `DataError` for another one.

    Their bytes are mapped, and read when they are used; arrays in Fortran order or of the other byte
    order are converted in memory.
    """
    leaves: dict[str, Leaf] = {}
    notes: dict[str, LeafNote] = {}
    member = ""
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            with zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    member = f"{info.filename!r}: "
                    name = info.filename.removesuffix(_END)
                    if name in leaves:
                        raise ValueError("there are two arrays of this name")
                    note = read_note(info)
                    notes[name] = msgspec.json.decode(note, type=LeafNote) if note else LeafNote()
                    leaves[name] = _leaf(*_mapped(archive, info, data), notes[name].dtype)
        member = ""
        return noted_file(leaves, notes)
    except Exception as error:  # the header of a member is read by NumPy, and can be anything
        raise DataError(
            f"{path}: not a .npz archive that can be read: {member}{str(error).rstrip('.')}."
        ) from error


def _mapped(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: memoryview
) -> tuple[np.dtype[Any], tuple[int, ...], bool, memoryview]:
    """dtype, shape, whether in Fortran order, and bytes of a member.

    Raises `ValueError` unless the member has exactly the bytes that its header says, and its checksum.
    """
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed; write it with numpy.savez")
    with archive.open(info) as member:
        major, minor = np.lib.format.read_magic(member)
        if (major, minor) not in ((1, 0), (2, 0)):
            raise ValueError(f"it has version {major}.{minor} of the format")
        headers = np.lib.format
        read = headers.read_array_header_1_0 if major == 1 else headers.read_array_header_2_0
        shape, fortran, dtype = read(member)
        begin = member.tell()
    if dtype.hasobject:  # its bytes are a pickle, of any length
        raise _no_leaf(dtype)
    if min(shape, default=0) < 0 or len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"it has the shape {shape}; expected at most {MAX_DIMENSIONS} lengths, none below 0"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    lengths = bytes(data[info.header_offset + 26 : info.header_offset + 30])
    name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    start = info.header_offset + 30 + name + extra
    whole = data[start : start + info.file_size]
    content = whole[begin:]
    if len(content) != nbytes or info.file_size != info.compress_size:
        raise ValueError(
            f"its header says {dtype}{list(shape)} of {nbytes} bytes, and it has "
            f"{info.file_size - begin}"
        )
    if zlib.crc32(whole) != info.CRC:
        raise ValueError("its bytes do not have the checksum of the archive; it is damaged")
    return dtype, shape, fortran, content


def _leaf(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    fortran: bool,
    content: memoryview,
    note: str | None,
) -> Leaf:
    """The leaf of a member; raises `ValueError` or `UnsupportedLeafError` for one that is no leaf."""
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        dtype = _noted_dtype(dtype, note)
    if dtype.kind == "U" and not shape:
        text = np.frombuffer(content, dtype)[0] if dtype.itemsize else ""
        return scalar_leaf(str(text))
    if dtype.kind not in "biufcV" or dtype.names is not None or dtype.subdtype is not None:
        raise _no_leaf(dtype)
    order = "F" if fortran else "C"
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, content, order=order)
    if note is None or not note.startswith("py:"):
        return array_leaf(array)
    return scalar_leaf(array.tobytes() if note == "py:bytes" else array.item())


def _no_leaf(dtype: np.dtype[Any]) -> ValueError:
    return ValueError(
        f"an array of dtype {dtype} cannot be a leaf; expected booleans or numbers, or one string. "
        f"Convert it, or write the archive without it"
    )


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


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    descr = f"|V{dtype.itemsize}" if _is_raw(dtype) else dtype.str
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def _joined(head: bytes, parts: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield head
    yield from parts
