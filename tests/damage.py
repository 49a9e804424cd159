"""Damage to the files of a run directory, and disks that fail."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path


def flip(path: Path, offset: int = 100) -> None:
    """Flip one bit of the byte at `offset`."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


@dataclass
class FullDisk:
    """For `LocalStorage`: there is no space for files whose path has `part`, when they are synced.

    Attributes:
        part: A part of the path.
        fired: The files for which there was none.
    """

    part: str
    fired: list[str] = field(default_factory=list)

    def __call__(self, operation: str, path: str) -> None:
        if operation == "fsync" and self.part in path:
            self.fired.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", path)


@dataclass
class Stop:
    """For `LocalStorage`: it fails before operation `left`, counted from 1, and only then.

    Attributes:
        left: How many operations are left until then.
        count: How often it has failed.
    """

    left: int = 0
    count: int = 0

    def __call__(self, operation: str, path: str) -> None:
        self.left -= 1
        if self.left == 0:
            self.count += 1
            raise OSError(errno.EIO, "stopped here", path)


def files(path: Path) -> dict[str, bytes]:
    """The bytes of every file but the lock, which names its last holder."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "lock"
    }
