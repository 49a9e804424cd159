"""Damage to the files of a run directory."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, offset: int = 100) -> None:
    """Flip one bit of the byte at `offset`."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def files(path: Path) -> dict[str, bytes]:
    """The bytes of every file but the lock, which names its last holder."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "lock"
    }
