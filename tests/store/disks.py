"""Real file systems that are small, full or read-only. Mounting them needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoMount(Exception):
    """No file system can be mounted on this machine; the text gives the reason."""


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[Path]:
    """Mount a file system on `path`; raises `NoMount` if that is not possible."""
    if os.geteuid() != 0:
        raise NoMount("mounting a file system needs root")
    path.mkdir(parents=True, exist_ok=True)
    try:
        made = subprocess.run(
            ["mount", *arguments, str(path)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise NoMount("there is no `mount` here") from None
    if made.returncode:
        raise NoMount(f"mount {' '.join(arguments)}: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)


@contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of `nbytes`."""
    with mounted(path, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs") as disk:
        yield disk


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk up to `leave` free bytes; removing the returned file frees the space."""
    ballast = disk / "ballast"
    status = os.statvfs(disk)
    room = status.f_bavail * status.f_frsize - leave
    with ballast.open("ab") as file:
        while room > 0:
            room -= file.write(bytes(min(room, 65536)))
    return ballast
