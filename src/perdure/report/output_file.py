"""Writes a page or a picture in place of an older one, so that no half file is left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from perdure.errors import ArgumentError

_HEAD_BYTES = 8


def write_output(path: Path, data: bytes) -> None:
    """Write `data` to `path`; an older file of the same kind is replaced in one step.

    An existing file that does not begin with the same bytes is no page, or no picture of this kind: it
    is kept. A pipe or a device is written to.

    Raises:
        ArgumentError: The file holds something else, or cannot be written.
    """
    try:
        if os.path.lexists(path) and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.is_file():
            with target.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if head not in (b"", data[:_HEAD_BYTES]):
                raise ArgumentError(
                    f"{path}: expected a new file, or an older file of this kind to replace; found a "
                    "file with other contents. Name another file, or remove that one."
                )
        _replace(target, data)
    except OSError as error:
        raise ArgumentError(
            f"{path}: cannot be written: {error}. Expected the path of a file in a directory that "
            "exists and can be written to."
        ) from error


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name[:40]}-{uuid4().hex[:8]}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
