"""Orbax checkpoints, written and read by Orbax, with all arrays in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.convert.formats import ForeignFile, NamedLeaf, noted_file
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError, missing_extra
from perdure.look.leaf_reader import chunks_in_order
from perdure.state import flatten
from perdure.state.paths import insert
from perdure.store.format import unescape
from perdure.store.leaf import numpy_dtype

DTYPES = None
"""All of NumPy and ml_dtypes."""

_MAX_NAME = 60_000
"""Below the 65,535 bytes of a key of its database, which has the number of a chunk in it, too."""


def write(
    path: str,
    checkpoint: StoredCheckpoint,
    arrays: Sequence[NamedLeaf],
    scalars: Sequence[NamedLeaf],
) -> None:
    """Write a checkpoint with one tree of nested dicts, whose keys are the parts of the names."""
    tree: dict[str, Any] = {}
    chunks_of = chunks_in_order(checkpoint, [leaf.entry for leaf in arrays])
    for leaf in arrays:
        if not leaf.entry.nbytes:
            raise UnsupportedLeafError(
                f"leaf {leaf.entry.path!r} has no element, and Orbax stores no empty array; "
                f"safetensors, torch and npz do. Leave it out with `--leaves`."
            )
        data = b"".join(chunks_of(leaf.entry))
        array = np.frombuffer(data, numpy_dtype(leaf.dtype)).reshape(leaf.shape)
        _insert(tree, leaf.name, array)
    for leaf in scalars:
        is_long = isinstance(leaf.value, int) and not -(2**63) <= leaf.value < 2**63
        if is_long or isinstance(leaf.value, (bytes, complex)):
            raise UnsupportedLeafError(
                f"leaf {leaf.entry.path!r} of type {leaf.dtype} is no scalar that Orbax keeps; "
                f"safetensors, torch and npz do. Leave it out with `--leaves`."
            )
        _insert(tree, leaf.name, leaf.value)
    with _orbax().PyTreeCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(path), tree)


def read(path: str) -> ForeignFile:
    """The arrays and scalars of a checkpoint; raises `DataError` if Orbax cannot read it.

    Their names are paths: a key of the tree is one part, even if it has dots.
    """
    ocp = _orbax()
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(os.path.abspath(path))
            arguments = _restore_arguments(ocp, found.item_metadata.tree)
            tree = checkpointer.restore(os.path.abspath(path), restore_args=arguments)
        leaves = dict(flatten(tree))
        return ForeignFile(noted_file(leaves, {}).leaves, {name: name for name in leaves})
    except Exception as error:
        raise DataError(f"{path}: not an Orbax checkpoint that can be read: {error}.") from error


def _restore_arguments(ocp: Any, tree: Any) -> Any:
    """Arrays as NumPy arrays, whatever devices they were saved from; scalars as they are."""
    if isinstance(tree, Mapping):
        return {key: _restore_arguments(ocp, child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_restore_arguments(ocp, child) for child in tree]
    is_array = hasattr(tree, "shape") and type(tree).__name__ != "ScalarMetadata"
    return ocp.RestoreArgs(restore_type=np.ndarray) if is_array else ocp.RestoreArgs()


def _insert(tree: dict[str, Any], name: str, value: Any) -> None:
    if not name:
        raise UnsupportedLeafError(
            "this state is one value without a name, and Orbax stores trees of named ones; take "
            "safetensors, torch or npz."
        )
    if len(name.encode()) > _MAX_NAME:
        raise ArgumentError(
            f"the name {name[:80]!r}... is longer than the {_MAX_NAME} bytes that Orbax holds; give it "
            f"another one: `--names`."
        )
    try:
        insert(tree, [unescape(part) for part in name.split("/")], value)
    except (TypeError, AttributeError) as error:
        raise ArgumentError(
            f"the name {name!r} lies below another leaf; give it another one: `--names`."
        ) from error


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        raise missing_extra("orbax", error) from error
    return orbax.checkpoint
