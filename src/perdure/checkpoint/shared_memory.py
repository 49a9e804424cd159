"""Memory that processes of one machine share, and the sockets by which they find each other."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from contextlib import suppress

_FILE = b"\0"
"""Travels with the file of the memory."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a connection."""

HAS_SHARED_MEMORY = hasattr(fcntl, "F_ADD_SEALS") and hasattr(socket, "SO_PEERCRED")


def listen_locally(name: str) -> socket.socket | None:
    """A socket that only processes of this machine find, by its name; None where that is forbidden."""
    with suppress(OSError):
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{name}")
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    return None


def require_same_user(connection: socket.socket) -> None:
    """Raise `ConnectionRefusedError` if the process at the other end is that of another user.

    The names of sockets can be seen by all users of the machine.
    """
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.geteuid():
        raise ConnectionRefusedError(f"it belongs to the user {user}")


def shared_memory(size: int) -> tuple[int | None, memoryview]:
    """Memory of `size` bytes that other processes of this machine may map, and its file.

    It takes pages once they are written to. No process can cut the file, which would kill those that
    read its memory. Without such memory, that of this process and None.
    """
    if HAS_SHARED_MEMORY:
        with suppress(OSError):  # forbidden
            file = os.memfd_create("perdure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(file, size)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
                return file, memoryview(mmap.mmap(file, size))
            except OSError:
                os.close(file)
    return None, memoryview(mmap.mmap(-1, size))


def received_memory(connection: socket.socket, size: int) -> memoryview:
    """The memory of `size` bytes that the process at the other end shares; others may not change it."""
    _, files, _, _ = socket.recv_fds(connection, len(_FILE), 1)
    if not files:
        raise ConnectionResetError("the connection was closed")
    try:
        if not fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("its shared memory could be cut while it is read")
        return memoryview(mmap.mmap(files[0], size, prot=mmap.PROT_READ))
    finally:
        os.close(files[0])


def send_memory(connection: socket.socket, file: int) -> None:
    """Let the process at the other end map the memory of `file`."""
    socket.send_fds(connection, [_FILE], [file])


def exactly(connection: socket.socket, size: int) -> memoryview:
    """The next `size` bytes; raises `ConnectionResetError` if the connection closes before."""
    data = memoryview(bytearray(size))
    target = data
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the connection was closed")
        target = target[count:]
    return data
