"""NumPy's archive of arrays, `.npz`, written and read a chunk at a time."""

from __future__ import annotations

import io
import mmap
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from perdure.errors import DataError
from perdure.inspect.foreign_leaves import ForeignLeaf
from perdure.inspect.stored_zip import StoredZip
from perdure.store.dtypes import numpy_dtype
from perdure.store.leaf import Leaf


def can_hold(value: Any) -> bool:
    """Whether a Python scalar has an exact form in an array."""
    if isinstance(value, bytes):
        return True
    array = np.asarray(value)
    same = array.dtype != object and array.item() == value
    return same or (array.dtype.kind in "fc" and repr(array.item()) == repr(value))


def write_npz(
    file: BinaryIO, leaves: Sequence[ForeignLeaf], scalars: Sequence[tuple[str, Any]]
) -> None:
    """Write arrays, and Python scalars as arrays without axes.

    bfloat16 and the other dtypes of ml_dtypes are written as NumPy writes them, as raw elements
    (`|V2`): `array.view(ml_dtypes.bfloat16)` gives them back.
    """
    with StoredZip(file) as archive:
        for leaf in leaves:
            header = _header(numpy_dtype(leaf.dtype), leaf.shape)
            archive.add(f"{leaf.name}.npy", _joined(header, leaf.chunks()))
        for name, value in scalars:
            array = (
                np.asarray(value) if not isinstance(value, bytes) else np.frombuffer(value, "u1")
            )
            archive.add(f"{name}.npy", [_header(array.dtype, array.shape), array.tobytes()])


def read_npz(path: str) -> dict[str, Leaf]:
    """The arrays of an archive of uncompressed members, by name; raises `DataError` for another one.

    Their bytes are mapped, and read when they are used. Raw elements are given as `uint8` with one more
    axis, because the archive does not say what they are.
    """
    leaves: dict[str, Leaf] = {}
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            with zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if info.compress_type != zipfile.ZIP_STORED:
                        raise ValueError("it is compressed; write it with numpy.savez")
                    with archive.open(info) as member:
                        leaf = _read_member(member, info, data)
                    leaves[info.filename.removesuffix(".npy")] = leaf
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a .npz archive that can be read: {error}.") from error
    return leaves


def _read_member(member: Any, info: zipfile.ZipInfo, data: memoryview) -> Leaf:
    major, minor = np.lib.format.read_magic(member)
    if (major, minor) not in ((1, 0), (2, 0)):
        raise ValueError(f"{info.filename} has version {major}.{minor} of the format")
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(member)
    if dtype.hasobject or (fortran and len(shape) > 1) or not dtype.isnative:
        raise ValueError(f"{info.filename} has dtype {dtype} and Fortran order {fortran}")
    local = info.header_offset
    lengths = bytes(data[local + 26 : local + 30])
    names, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    start = local + 30 + names + extra + member.tell()
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    content = data[start : start + nbytes]
    if dtype.kind == "U":
        text = np.frombuffer(content, dtype).reshape(shape)
        if shape:
            raise ValueError(f"{info.filename} is an array of strings")
        return Leaf("py:str", (), memoryview(str(text[()]).encode()), frozen=True)
    if dtype.kind == "V":
        return Leaf("uint8", (*shape, dtype.itemsize), content, frozen=True)
    return Leaf(dtype.name, shape, content, frozen=True)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    raw = dtype.type.__module__ != "numpy"
    descr = f"|V{dtype.itemsize}" if raw else dtype.str
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def _joined(head: bytes, parts: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield head
    yield from parts
