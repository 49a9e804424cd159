"""Zip archives of uncompressed members: written a part at a time, with the same bytes in every run."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from typing import BinaryIO

ALIGNMENT = 64
_ZIP64_EXTRA = 20
_PADDING_ID = b"FB"  # as PyTorch writes it
_NOTE_ID = b"PD"
MAX_NAME = 65_535
MAX_NOTE = 65_000
"""The most bytes of the name of a member, and of the note on it."""


class StoredZip:
    """A zip archive whose members begin at multiples of 64 bytes, so that they can be mapped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def __enter__(self) -> StoredZip:
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()

    def add(self, name: str, parts: Iterable[bytes | memoryview], note: bytes = b"") -> None:
        """Append a member, with a note that other readers skip."""
        info = zipfile.ZipInfo(name)  # of 1980-01-01
        extra = _NOTE_ID + len(note).to_bytes(2, "little") + note if note else b""
        header = self._file.tell() + 30 + len(name.encode()) + _ZIP64_EXTRA + len(extra) + 4
        padding = -header % ALIGNMENT
        info.extra = extra + _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        with self._zip.open(info, "w", force_zip64=True) as member:
            for part in parts:
                member.write(part)


def read_note(info: zipfile.ZipInfo) -> bytes:
    """The note on a member; b"" without one."""
    extra = info.extra
    while len(extra) >= 4:
        end = 4 + int.from_bytes(extra[2:4], "little")
        if extra[:2] == _NOTE_ID:
            return extra[4:end]
        extra = extra[end:]
    return b""
