"""Files of `torch.save`: a dict from names to tensors and Python scalars.

PyTorch reads them with `weights_only=True` and never otherwise, so that no code in a file runs.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from perdure.convert.foreign_leaves import (
    ForeignFile,
    LeafNote,
    NamedLeaf,
    Reader,
    Scalars,
    noted_file,
)
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError, missing_extra
from perdure.look.leaf_reader import ChunksOf
from perdure.state import flatten
from perdure.state.paths import split_path
from perdure.store.leaf import Leaf

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_NOTES = "archive/perdure.json"


def can_hold(_: Any) -> bool:
    """Every Python scalar is written as it is."""
    return True


def write(path: str, leaves: Sequence[NamedLeaf], reader: Reader, scalars: Scalars) -> None:
    """Write a state dict: arrays in the order in which they are read, and values of Python.

    All arrays are in memory. A leaf without a name, which is a whole state, is written without a dict.
    The notes stand in a member of their own, which PyTorch skips.
    """
    torch = _torch()
    chunks_of = reader(leaves)
    items = [(leaf.name, _tensor(torch, leaf, chunks_of)) for leaf in leaves]
    items += [(leaf.name, value) for leaf, value in scalars]
    state = dict(sorted(items, key=lambda item: item[0]))
    with open(path, "wb") as file:  # the name of a file would be that of the folder in it
        torch.save(state[""] if state.keys() == {""} else state, file)
    notes = {leaf.name: leaf.note for leaf in leaves}
    notes |= {leaf.name: LeafNote(path=leaf.noted_path) for leaf, _ in scalars}
    notes = {name: note for name, note in notes.items() if note != LeafNote()}
    if notes:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(zipfile.ZipInfo(_NOTES), msgspec.json.encode(notes))


def _tensor(torch: Any, leaf: NamedLeaf, chunks_of: ChunksOf) -> Any:
    dtype = getattr(torch, leaf.dtype)
    data = bytearray().join(chunks_of(leaf.entry))
    if not data:
        return torch.empty(leaf.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that complex32 is experimental
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(leaf.shape)


def read(path: str) -> ForeignFile:
    """The tensors and Python scalars of a file of `torch.save`, with dots between nested keys.

    Raises:
        DataError: It cannot be read, or has anything else in it.
        ArgumentError: Two of them would have one name.
        MissingExtraError: PyTorch is not installed.
    """
    torch = _torch()
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
        return msgspec.json.decode(archive.read(_NOTES), type=dict[str, LeafNote])


def _torch() -> Any:
    try:
        return import_module("torch")
    except ModuleNotFoundError as error:
        raise missing_extra("torch", error) from error
