"""Reading files of other tools: their arrays by name."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from perdure.convert.foreign_leaves import ForeignFile
from perdure.errors import ArgumentError, DataError

_MODULES = {
    "safetensors": "safetensors_files",
    "torch": "torch_file",
    "npz": "npz_file",
    "orbax": "orbax_folder",
}
"""Each has DTYPES (None for all of NumPy and ml_dtypes), `can_hold` for scalars, `write` and `read`."""

READ_FORMATS = tuple(_MODULES)


def format_module(kind: str) -> Any:
    """The module of a format; few programs need more than one."""
    return import_module(f"perdure.convert.{_MODULES[kind]}")


def read_foreign(path: str, kind: str) -> ForeignFile:
    """The arrays and scalars of a file or folder. Each can be saved, and restored from a checkpoint.

    Where the format allows it, the bytes are mapped: they are read when they are used, and the system
    may drop them from memory at any time.

    Raises:
        DataError: It cannot be read, is not of this kind, or holds what cannot be a leaf.
        ArgumentError: Two leaves of it have one name.
        MissingExtraError: The library of the format is not installed.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: expected a file or folder, found a pipe or a device.")
    return format_module(kind).read(path)


def kind_of(path: str) -> str:
    """The format of a file or folder, from what is there.

    Raises:
        DataError: There is nothing.
        ArgumentError: It is not known; the caller names the format.
    """
    if os.path.isdir(path):
        names = os.listdir(path)
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return "safetensors"
        if "_METADATA" in names or "_CHECKPOINT_METADATA" in names:
            return "orbax"
    elif not os.path.exists(path):
        raise DataError(f"{path}: expected a file or folder, found nothing.")
    else:
        extension = os.path.splitext(path)[1]
        known = {".safetensors": "safetensors", ".npz": "npz"}
        known |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")
        if extension in known:
            return known[extension]
    raise ArgumentError(
        f"{path}: its format is not known from its name; name it: one of {', '.join(READ_FORMATS)}."
    )
