"""Orbax checkpoints, read by Orbax, with all arrays in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from perdure.convert.formats import ForeignFile, noted_file
from perdure.errors import DataError, needs_extra
from perdure.state import flatten


def read(path: str) -> ForeignFile:
    """The arrays and scalars of a checkpoint; raises `DataError` if Orbax cannot read it.

    Their names are paths: a key of the tree is one part, even if it has dots.
    """
    with needs_extra("orbax"):
        import orbax.checkpoint as ocp
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
