"""Opens the files of a run. No pipe is waited for, and a directory that was removed is made again."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def create_file(path: Path, flags: int = 0) -> int:
    """Open `path`, which may not be a link, to write; returns the descriptor."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def open_file(path: Path) -> BinaryIO:
    """Open `path` to read; raises `OSError` if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return open(descriptor, "rb")


def remedy(error: OSError, path: Path) -> str:
    """What to do about a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there"
    return f"make {path.parent} a directory that can be written"
