"""A checkpoint by the path of its manifest file, as version control has it.

`git difftool` compares two files, of which one may be a copy in a temporary directory. The chunks are
looked for in the run directory around either file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from perdure.errors import ArgumentError, NotARunError
from perdure.inspect.address import StoredCheckpoint
from perdure.store import Run
from perdure.store.failures import read_error
from perdure.store.format import PACKS
from perdure.store.manifest import LeafEntry
from perdure.store.manifest_json import decode_manifest


def is_manifest_file(where: object) -> bool:
    """Whether an argument is the path of a file and not of a run directory."""
    return isinstance(where, (str, os.PathLike)) and os.path.isfile(where)


def open_manifest_file(
    where: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]] = ()
) -> StoredCheckpoint:
    """Open the checkpoint that a manifest file describes.

    Args:
        where: The file.
        others: Paths of other manifest files, whose run directory may have the chunks.

    Raises:
        ArgumentError: Neither it nor one of `others` lies in a run directory.
        CorruptionError: The file is no manifest, or it is damaged.
        UnreachableError: It cannot be read.
    """
    path = Path(where)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise read_error(error, str(path)) from error
    manifest = decode_manifest(data, str(path), None)
    for candidate in (path, *map(Path, others)):
        try:
            run = Run(candidate.absolute().parent.parent)
        except NotARunError:
            continue
        return StoredCheckpoint(run, manifest, str(path), is_loose=True)
    raise ArgumentError(
        f"{path}: expected a manifest in the directory `checkpoints` of a run directory, found a file "
        f"without one around it. Name the run directory, or one of its checkpoints, RUN@STEP."
    )


class Availability:
    """Which leaves of a checkpoint have all their packs: those of a committed one are not checked."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._lost: set[int] = set()
        if checkpoint.is_loose:
            present = set(checkpoint.run.storage.list(PACKS))
            packs = checkpoint.manifest.packs
            self._lost = {n for n, pack in enumerate(packs) if PACKS + pack.name not in present}

    def has(self, entry: LeafEntry) -> bool:
        """Whether the packs of a leaf may be read."""
        return not any(chunk.pack in self._lost for chunk in entry.chunks)
