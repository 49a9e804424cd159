"""A checkpoint by the path of its manifest file, as version control has it.

`git difftool` compares two files, of which both may be copies in a temporary directory. The chunks are
looked for in the run directory around either file; without one, leaves are compared by their hashes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import NotARunError
from perdure.store import Run
from perdure.store.failures import read_error
from perdure.store.manifest_json import decode_manifest
from perdure.store.memory import MemoryStorage


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
    nowhere = Run(MemoryStorage(), create=True)  # has no chunk
    return StoredCheckpoint(nowhere, manifest, str(path), is_loose=True)
