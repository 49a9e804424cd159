"""What a failed read means: damage, or an error of the environment.

Bytes are damaged if they contradict their hash or schema, or if their file is gone while a durable
manifest names it. Every other failure says nothing about the bytes: the read is retried if that can
help, then raises `UnreachableError`, and nothing is set aside.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from perdure.errors import CorruptionError, StoreError, UnreachableError
from perdure.runtime.system import ENOKEY

PAUSES = (0.01, 0.05, 0.2)
"""Seconds before the second, third and fourth attempt."""

_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_ADVICE = {
    errno.EACCES: "Give this user the right to read it",
    errno.EPERM: "Give this user the right to read it",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`) or close some",
    errno.ENFILE: "Close files on this machine",
    errno.ENOLINK: "Bring the target of the link back",
    errno.ENODEV: "Bring the directory back and start this program again",
    errno.ENOMEM: "Free memory and try again",
    ENOKEY: "Set these variables and start again",
    errno.EIO: "The kernel's log has what the disk reported",
}

T = TypeVar("T")
_sleep = time.sleep


class DamagedChunk(CorruptionError):
    """A chunk at an offset of a pack is not what a manifest says; offset -1 means the whole pack."""

    # The defaults are for pickle, which calls this with the message and then sets the attributes.
    def __init__(self, message: str, pack: str = "", offset: int = -1) -> None:
        super().__init__(message)
        self.pack = pack
        self.offset = offset


class UnreadChunk(UnreachableError):
    """A chunk of a pack cannot be read. It need not be damaged."""

    def __init__(self, message: str, pack: str = "") -> None:
        super().__init__(message)
        self.pack = pack


def is_gone(error: OSError) -> bool:
    """Whether there is no such file, which is damage if a manifest names it."""
    return isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))


@contextmanager
def naming(operation: str, path: str) -> Iterator[None]:
    """Let an `OSError` name the operation and the path, if it names no path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"{operation}: {error.strerror or error}", path) from error


def retried(work: Callable[[], T]) -> T:
    """Call `work`, up to four times while it fails with an error that may pass; returns its result."""
    for pause in PAUSES:
        try:
            return work()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
        _sleep(pause)
    return work()


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Let an `OSError` of a read in the block be the `read_error` about `what`."""
    try:
        yield
    except OSError as error:
        raise read_error(error, what) from error


def read_error(error: OSError | MemoryError, what: str) -> StoreError:
    """`CorruptionError` if there is no such file, otherwise `UnreachableError`; `what` was read."""
    if isinstance(error, OSError) and is_gone(error):
        return CorruptionError(f"{what}: expected a file, found none ({error}).")
    code = error.errno if isinstance(error, OSError) else errno.ENOMEM
    advice = _ADVICE.get(code or 0, "Try again once the storage answers")
    reason = str(error).rstrip(".") or "out of memory"
    return UnreachableError(
        f"{what}: cannot be read: {reason}. This says nothing about its contents, so nothing was "
        f"changed and no older checkpoint was used instead. {advice}; to continue with an older "
        f"checkpoint, restore its step by number."
    )
