"""What a failed read says about the bytes that were asked for.

Damage is what the bytes say: they contradict their hash or their schema, or their file is gone while a
durable manifest names it. Every other failure (no permission, too many open files, a stale handle, a
disk that reports an error, no answer) says nothing about the bytes. It is tried again where that helps
and raised as `UnreachableError`; nothing moves to quarantine and no older checkpoint takes its place.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from perdure.errors import CorruptionError, StoreError, UnreachableError

PAUSES = (0.01, 0.05, 0.2)
"""Seconds before the second, third and fourth attempt."""

_PASSING = frozenset(
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
    errno.ENODEV: "Bring the directory back and start this program again",
    errno.ENOMEM: "Free memory and try again",
    errno.EIO: "The kernel's log says what the disk reported",
}

T = TypeVar("T")
_sleep = time.sleep


class DamagedChunk(CorruptionError):
    """A chunk in a pack is not what manifests say; offset -1 stands for the pack as a whole."""

    def __init__(self, message: str, pack: str, offset: int) -> None:
        super().__init__(message)
        self.pack = pack
        self.offset = offset


def is_gone(error: OSError) -> bool:
    """Whether an error says that there is no such file, which is damage where a manifest names it."""
    return isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))


def retried(work: Callable[[], T]) -> T:
    """`work`, a few times over while it fails with an error that may pass."""
    for pause in PAUSES:
        try:
            return work()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        _sleep(pause)
    return work()


def read_error(error: OSError | MemoryError, what: str) -> StoreError:
    """The error to raise from a failed read of `what`: a file, with the step that needs it.

    `CorruptionError` if there is no such file, `UnreachableError` otherwise.
    """
    if isinstance(error, OSError) and is_gone(error):
        return CorruptionError(f"{what}: expected a file, found none ({error}).")
    code = error.errno if isinstance(error, OSError) else errno.ENOMEM
    advice = _ADVICE.get(code or 0, "Try again once the storage answers")
    said = str(error).rstrip(".") or "out of memory"
    return UnreachableError(
        f"{what}: cannot be read: {said}. This says nothing about its contents, so nothing was "
        f"changed and no older checkpoint was used instead. {advice}; to continue with an older "
        f"checkpoint, restore its step by number."
    )
