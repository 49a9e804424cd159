"""What the operating system offers, where Linux, macOS and Windows differ.

macOS has neither /proc nor O_DIRECT, and its `fsync` leaves bytes in the cache of the disk. Windows
has no `fcntl`, no fork and no positional reads: runs are only read there.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from perdure.errors import LaunchError, SaveError

fcntl: Any = None
"""The module, or None on Windows."""
with suppress(ImportError):
    import fcntl

IS_LINUX = sys.platform == "linux"
"""Whether /proc tells of other processes."""

# Numbers that Linux alone has; elsewhere others stand for them, which perdure uses for nothing else.
ENOKEY: int = getattr(errno, "ENOKEY", errno.EDESTADDRREQ)
EREMOTEIO: int = getattr(errno, "EREMOTEIO", errno.EPROTO)

_NO_FULL_SYNC = (errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems answer that have no F_FULLFSYNC, such as network file systems."""


def require_saving(where: str) -> None:
    """Raise `SaveError` on a system where no run can be locked and made durable."""
    if fcntl is None:
        raise SaveError(
            f"{where}: cannot be written to, because this system has no `fcntl` to lock it with: save "
            f"and delete checkpoints on Linux (WSL is enough) or macOS, and read them here."
        )


def require_processes(usage: str) -> None:
    """Raise `LaunchError` on a system where workers cannot be watched; `usage` is the command."""
    if fcntl is None:
        raise LaunchError(
            f"`{usage.removesuffix(' --')}` needs the signals and sessions of Linux or macOS, which "
            f"this system does not have: start the program by itself, or in WSL."
        )


def require_linux(what: str, why: str, instead: str) -> None:
    """Raise `LaunchError` with these three in one sentence, except on Linux."""
    if not IS_LINUX:
        raise LaunchError(f"{what} needs Linux, {why}: {instead}.")


def open_flags(*names: str) -> int:
    """Those of the flags of `os.open` that this system has."""
    return sum(getattr(os, name, 0) for name in names)


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Those of the signals that this system has."""
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


def at_fork(**calls: Callable[[], object]) -> None:
    """`os.register_at_fork`, if this system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)


def sync_file(fd: int) -> None:
    """Make what an open file or directory holds durable."""
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(fd)


def read_into(fd: int, target: memoryview, offset: int) -> int:
    """Read at `offset` of an open file that no other thread reads; returns the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [target], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    with open(fd, "rb", buffering=0, closefd=False) as file:
        return file.readinto(target) or 0


def has_ended(pid: int) -> bool:
    """Whether there is no process with this ID, on systems without /proc (not for Windows)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
