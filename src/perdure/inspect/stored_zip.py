"""Writing zip archives of uncompressed members, a part at a time, with the same bytes in every run."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from typing import BinaryIO

ALIGNMENT = 64
_ZIP64_EXTRA = 20
_PADDING_ID = b"FB"  # as PyTorch writes it


class StoredZip:
    """A zip archive whose members begin at multiples of 64 bytes, so that they can be mapped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def __enter__(self) -> StoredZip:
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()

    def add(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Append a member."""
        info = zipfile.ZipInfo(name)  # of 1980-01-01
        header = self._file.tell() + 30 + len(name.encode()) + _ZIP64_EXTRA + 4
        padding = -header % ALIGNMENT
        info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        with self._zip.open(info, "w", force_zip64=True) as member:
            for part in parts:
                member.write(part)
