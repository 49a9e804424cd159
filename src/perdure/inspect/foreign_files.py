"""Reading files of other tools: their arrays by name."""

from __future__ import annotations

import os
import pickle
from importlib import import_module
from typing import Any

from perdure.errors import ArgumentError, DataError, missing_extra
from perdure.state import flatten
from perdure.state.paths import split_path
from perdure.store.leaf import Leaf

READ_FORMATS = ("safetensors", "torch", "npz", "orbax")


def read_foreign(path: str, kind: str) -> dict[str, Leaf]:
    """The arrays and scalars of a file or folder by name.

    Where the format allows it, the bytes are mapped: they are read when they are used, and the system
    may drop them from memory at any time.

    Raises:
        DataError: It cannot be read, or is not of this kind.
        MissingExtraError: The library of the format is not installed.
    """
    if kind == "safetensors":
        from perdure.inspect.safetensors_files import read_safetensors

        return read_safetensors(path)
    if kind == "npz":
        from perdure.inspect.npz_file import read_npz

        return read_npz(path)
    if kind == "orbax":
        from perdure.inspect.orbax_folder import read_orbax

        return read_orbax(path)
    return _read_torch(path)


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


def _read_torch(path: str) -> dict[str, Leaf]:
    try:
        torch: Any = import_module("torch")
    except ModuleNotFoundError as error:
        raise missing_extra("torch", error) from error
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file in the format of PyTorch before 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: has more than tensors, Python scalars and containers, which perdure does not "
            f"load, because loading it can run any code: {error}"
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise DataError(f"{path}: not a file of torch.save that can be read: {error}.") from error
    return {".".join(split_path(path)): leaf for path, leaf in flatten(state).items()}
