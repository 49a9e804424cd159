"""Files of `torch.save`: a dict from names to tensors and Python scalars.

PyTorch reads them with `weights_only=True` and never otherwise, so that no code in a file runs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from perdure.checkpoint.address import StoredCheckpoint
from perdure.convert.formats import ForeignFile, NamedLeaf, add_notes, noted_file, read_notes
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError, needs_extra
from perdure.look.leaf_reader import chunks_in_order, scalar_value
from perdure.state import flatten
from perdure.state.paths import split_path
from perdure.store.leaf import Leaf

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_NOTES = "archive/perdure.json"  # a member that PyTorch skips


def write(
    path: str,
    checkpoint: StoredCheckpoint,
    arrays: Sequence[NamedLeaf],
    scalars: Sequence[NamedLeaf],
) -> None:
    """Write a state dict, or the only value of a state; all arrays are in memory."""
    torch = _torch()
    chunks_of = chunks_in_order(checkpoint, [leaf.entry for leaf in arrays])
    values = {leaf.name: scalar_value(leaf.entry) for leaf in scalars}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that complex32 is experimental
        for leaf in arrays:
            data = bytearray().join(chunks_of(leaf.entry))
            dtype = getattr(torch, leaf.dtype)
            flat = (
                torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=dtype)
            )
            values[leaf.name] = flat.view(dtype).reshape(leaf.shape)
    state = dict(sorted(values.items()))
    with open(path, "wb") as file:  # the name of a file would be that of the folder in it
        torch.save(state[""] if state.keys() == {""} else state, file)
    add_notes(path, _NOTES, {leaf.name: leaf.note for leaf in (*arrays, *scalars)})


def read(path: str) -> ForeignFile:
    """The tensors and Python scalars of a file of `torch.save`, with dots between nested keys.

    Raises DataError, ArgumentError (two of one name), MissingExtraError.
    """
    try:
        found = flatten(_load(_torch(), path))
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
        return noted_file(leaves, read_notes(path, _NOTES))
    except Exception as error:  # a damaged archive, of which PyTorch checks less
        raise DataError(f"{path}: cannot be imported: {error}.") from error


def _load(torch: Any, path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that complex32 is experimental, for one
        try:
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # a file in the format of PyTorch before 1.6 cannot be mapped
                return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a file with any bytes makes its reader fail anywhere
            text = str(error)
            match = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", text)
            what = match[1] if match else "something else, or no file of torch.save"
            if "TorchScript" in text:
                what = "a program of TorchScript"
            # Other texts are a number, or advice to read the file unsafely.
            elif isinstance(error, (RuntimeError, OSError)):
                what += f": {text.rstrip('.')}"
            raise DataError(
                f"{path}: expected tensors, Python scalars and containers that PyTorch can load, found "
                f"{what}. All else can run any code: if you trust it, load it with the program that "
                f"wrote it, and save `model.state_dict()` alone."
            ) from error


def _torch() -> Any:
    with needs_extra("torch"):
        return import_module("torch")
