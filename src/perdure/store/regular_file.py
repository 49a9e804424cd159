"""Opens the files of a run: a pipe or a device in the place of one is an error, not a long wait."""

from __future__ import annotations

import errno
import os
import stat

from perdure.runtime.system import open_flags

MAX_WHOLE_BYTES = 1024 * 1024 * 1024
"""No file that is read as a whole has more bytes: a manifest is the longest of them."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# Windows would translate the ends of lines without O_BINARY, and lacks the other three.
_ALWAYS = open_flags("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY")


class NotAFile(IsADirectoryError):
    """Something else has the place of a file, which is damage as a directory there is."""


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """The descriptor of the regular file at `path`, opened without waiting; `NotAFile` for others."""
    try:
        descriptor = os.open(path, flags | _ALWAYS, 0o644)
    except OSError as error:
        # A directory that is opened to write, a socket, or a pipe that nobody reads.
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _other(path, os.stat(path).st_mode) from error
        raise
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    raise _other(path, found)


def read_whole(path: str) -> bytes:
    """The bytes of a regular file; raises as `open_regular`, and `NotAFile` if it has too many."""
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_WHOLE_BYTES:
            raise NotAFile(
                errno.EFBIG, f"expected at most {MAX_WHOLE_BYTES} bytes, found {size}", path
            )
        return file.read()


def size_of(path: str) -> int:
    """The bytes of a regular file; raises as `open_regular`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _other(path, status.st_mode)
    return status.st_size


def _other(path: str, mode: int) -> NotAFile:
    found = _KINDS.get(stat.S_IFMT(mode), "another thing")
    return NotAFile(errno.EISDIR, f"expected a regular file, found {found}", path)
