"""A state dict in the zip format of `torch.save`: written without PyTorch, a chunk at a time, and read.

The pickle in it holds a dict from names to tensors and Python scalars, from the opcodes and functions
that `torch.load(weights_only=True)` accepts. PyTorch reads it, and always in that way, so that no code
in a file runs.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any, BinaryIO

import msgspec

from perdure.convert.foreign_leaves import ForeignFile, ForeignLeaf, LeafNote, noted_file
from perdure.convert.stored_zip import StoredZip
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError, missing_extra
from perdure.state import flatten
from perdure.state.paths import split_path
from perdure.store.leaf import Leaf

# The dtypes that have a class of storages, and those that PyTorch added later without one.
_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_UNTYPED = (
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)
DTYPES = (*_STORAGES, *_UNTYPED)
_NOTES = "archive/perdure.json"


def write_torch(
    file: BinaryIO,
    leaves: Sequence[ForeignLeaf],
    scalars: Sequence[tuple[str, Any]],
    notes: dict[str, LeafNote],
) -> None:
    """Write a state dict: arrays in the order in which they are read, and values of Python.

    A leaf without a name, which is a whole state, is written as it is, without a dict. The notes stand
    in a member of their own, which PyTorch skips.
    """
    notes = {name: note for name, note in notes.items() if note != LeafNote()}
    with StoredZip(file) as archive:
        archive.add("archive/data.pkl", [_pickle(leaves, scalars)])
        archive.add("archive/byteorder", [b"little"])
        for number, leaf in enumerate(leaves):
            archive.add(f"archive/data/{number}", leaf.chunks())
        if notes:
            archive.add(_NOTES, [msgspec.json.encode(notes)])
        archive.add("archive/version", [b"3\n"])


def read_torch(path: str) -> ForeignFile:
    """The tensors and Python scalars of a file of `torch.save`, with dots between nested keys.

    Raises:
        DataError: It cannot be read, or has anything else in it.
        ArgumentError: Two of them would have one name.
        MissingExtraError: PyTorch is not installed.
    """
    try:
        torch: Any = import_module("torch")
    except ModuleNotFoundError as error:
        raise missing_extra("torch", error) from error
    if _is_torchscript(path):
        raise DataError(
            f"{path}: expected tensors, Python scalars and containers, found a program of TorchScript. "
            f"Where you trust the file, save `torch.jit.load(...).state_dict()` with torch.save."
        )
    try:
        state = _load(torch, path)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(error))
        what = f"found {match[1]}" if match else "found something else, or no file of torch.save"
        raise DataError(
            f"{path}: expected tensors, Python scalars and containers, {what}. perdure loads nothing "
            f"else, because that can run any code. Where you trust the file, load it with the program "
            f"that wrote it, and save `model.state_dict()` alone."
        ) from error
    except Exception as error:  # a file with any bytes
        reason = _reason(error)
        raise DataError(
            f"{path}: not a file of torch.save that PyTorch can load safely: {reason}. Where you trust "
            f"the file, load it with the PyTorch that wrote it, and save `model.state_dict()` again."
        ) from error
    try:
        found = flatten(state)
    except UnsupportedLeafError as error:
        raise DataError(f"{path}: {error}") from error
    leaves: dict[str, Leaf] = {}
    sources: dict[str, str] = {}
    for source, leaf in found.items():
        name = ".".join(split_path(source))
        if name in leaves:
            raise ArgumentError(
                f"{path}: the tensors at {sources[name]!r} and {source!r} would both be called "
                f"{name!r}. Save the file again with another key for one of them."
            )
        leaves[name], sources[name] = leaf, source
    try:
        return noted_file(leaves, _read_notes(path))
    except Exception as error:  # a damaged archive, of which PyTorch checks less
        raise DataError(f"{path}: cannot be imported: {error}.") from error


def _is_torchscript(path: str) -> bool:
    """Whether a file is an archive of `torch.jit.save`, for which `torch.load` has its own warnings."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.partition("/")[2] == "constants.pkl" for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False  # the reader of PyTorch says what it is


def _reason(error: Exception) -> str:
    """What an error of PyTorch says; a file of other bytes makes its reader fail anywhere."""
    if isinstance(error, (LookupError, EOFError)):  # its text is a number or nothing
        return "its bytes are not those of torch.save"
    return str(error).rstrip(".") or type(error).__name__


def _load(torch: Any, path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that complex32 is experimental, for one
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file in the format of PyTorch before 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)


def _read_notes(path: str) -> dict[str, LeafNote]:
    """The notes of an export; none in a file of another writer."""
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        if _NOTES not in archive.namelist():
            return {}
        if archive.getinfo(_NOTES).compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{_NOTES} is compressed")
        return msgspec.json.decode(archive.read(_NOTES), type=dict[str, LeafNote])


def _pickle(leaves: Sequence[ForeignLeaf], scalars: Sequence[tuple[str, Any]]) -> bytes:
    items = [(leaf.name, _tensor(number, leaf)) for number, leaf in enumerate(leaves)]
    items += [(name, _value(value)) for name, value in scalars]
    if [name for name, _ in items] == [""]:
        return b"\x80\x02" + items[0][1] + b"."
    pairs = b"".join(_text(name) + value for name, value in sorted(items))
    return b"\x80\x02}(" + pairs + b"u."


def _tensor(number: int, leaf: ForeignLeaf) -> bytes:
    """The call that rebuilds one contiguous tensor over a storage of its own."""
    typed = leaf.dtype in _STORAGES
    storage_class = (
        ("torch", _STORAGES[leaf.dtype]) if typed else ("torch.storage", "UntypedStorage")
    )
    elements = math.prod(leaf.shape)
    persistent = _tuple(
        _text("storage"),
        _global(*storage_class),
        _text(str(number)),
        _text("cpu"),
        _int(elements if typed else leaf.nbytes),
    )
    strides = [math.prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape))]
    no_hooks = _global("collections", "OrderedDict") + b")R"
    arguments = [
        persistent + b"Q",
        _int(0),
        _tuple(*map(_int, leaf.shape)),
        _tuple(*map(_int, strides)),
        b"\x89",
        no_hooks,
    ]
    if typed:
        return _global("torch._utils", "_rebuild_tensor_v2") + _tuple(*arguments) + b"R"
    dtype = _global("torch", leaf.dtype)
    return _global("torch._utils", "_rebuild_tensor_v3") + _tuple(*arguments, dtype) + b"R"


def _value(value: Any) -> bytes:
    """A Python scalar."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _int(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, complex):
        parts = _tuple(_value(value.real), _value(value.imag))
        return _global("builtins", "complex") + parts + b"R"
    if isinstance(value, bytes):
        text = _tuple(_text(value.decode("latin1")), _text("latin1"))
        return _global("_codecs", "encode") + text + b"R"
    return _text(value)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _int(number: int) -> bytes:
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<i", len(data)) + data
