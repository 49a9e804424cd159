"""Connections of processes that exchange bytes, and the memory that processes of one machine share."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from queue import SimpleQueue
from typing import Any

from perdure.runtime.system import fcntl
from perdure.store.format import CHUNK_BYTES

HELLO_S = 30.0
"""How long a process that has connected may take until it says who it is."""

_FILE = b"\0"
"""Travels with the file of the memory."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a connection."""

HAS_SHARED_MEMORY = hasattr(fcntl, "F_ADD_SEALS") and hasattr(socket, "SO_PEERCRED")


class Connections:
    """The sockets of one process and the threads that use them, which share a `guard` and end
    together."""

    def __init__(self, threads: str) -> None:
        self.guard = threading.Condition()
        self._name = threads
        self._is_closed = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def keep(self, connection: socket.socket) -> socket.socket:
        """Close `connection` with the others; raises `ConnectionAbortedError` if they are closed."""
        with self.guard:
            if not self._is_closed:
                self._open.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("the connections are closed")

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` in a thread of its own."""
        thread = threading.Thread(target=work, args=arguments, name=self._name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def listen_locally(self, name: str) -> socket.socket | None:
        """A socket that processes of this machine find by its name; None where that is forbidden."""
        with suppress(OSError):
            listener = self.keep(socket.socket(socket.AF_UNIX))
            listener.bind(f"\0{name}")
            listener.listen(1024)
            return listener
        return None

    def connect_locally(self, name: str, hello: bytes, limit: float | None = None) -> socket.socket:
        """A connection to the process of this user that listens under `name`."""
        connection = self.keep(socket.socket(socket.AF_UNIX))
        connection.settimeout(limit)
        connection.connect(f"\0{name}")
        require_same_user(connection)
        connection.sendall(hello)
        return connection

    def accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """Call `serve` with every connection that is made to `listener`, each in a thread."""

        def wait() -> None:
            with suppress(OSError):  # closed
                while True:
                    self.start(serve, self.keep(listener.accept()[0]))

        self.start(wait)

    def close(self) -> None:
        """Close all, and wait for the threads. May be called twice."""
        with self.guard:
            self._is_closed = True
        for connection in self._open:
            with suppress(OSError):  # wakes the thread that waits in it
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._open:
            connection.close()


class Slots:
    """Memory for a few chunks. Other processes of this machine may map its `file`, which is None where
    that is forbidden. No process can cut it, which would kill its readers."""

    def __init__(self, count: int) -> None:
        self._size = count * CHUNK_BYTES
        self.file = _shared_file(self._size)
        self.free: SimpleQueue[int] = SimpleQueue()
        for slot in range(count):
            self.free.put(slot)

    @cached_property
    def _memory(self) -> memoryview:
        """Mapped at its first use: one process alone needs none."""
        return memoryview(mmap.mmap(-1 if self.file is None else self.file, self._size))

    def memory(self, slot: int) -> memoryview:
        """The memory of a slot."""
        return self._memory[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]

    def share(self, connection: socket.socket) -> None:
        """Let the process at the other end map the memory."""
        if self.file is None:
            raise ConnectionRefusedError("there is no memory to share")
        socket.send_fds(connection, [_FILE], [self.file])

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def _shared_file(size: int) -> int | None:
    if not HAS_SHARED_MEMORY:
        return None
    with suppress(OSError):
        file = os.memfd_create("perdure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(file)
        else:
            return file
    return None


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


def hello_of(connection: socket.socket, size: int) -> memoryview:
    """The first bytes from a process that has connected. One of this machine is of this user."""
    connection.settimeout(HELLO_S)
    if connection.family == socket.AF_UNIX:
        require_same_user(connection)
    hello = exactly(connection, size)
    connection.settimeout(None)
    return hello


def require_same_user(connection: socket.socket) -> None:
    """Refuse another user at the other end, who can see the names of sockets too."""
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.geteuid():
        raise ConnectionRefusedError(f"it belongs to the user {user}")


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
