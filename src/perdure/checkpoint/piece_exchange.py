"""Moves pieces of chunks from the processes that have them to those that write them.

Each process listens while it saves, and answers requests for pieces from its shards. A process asks for
the pieces of a chunk when it puts the chunk together, so that few of them are in memory at a time. The
chief hands out the addresses, with a key without which no request is answered. Every answer carries its
hash.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from blake3 import blake3
from msgspec import Struct

from perdure.framework_group import framework_group
from perdure.store.shard_chunks import Fetch

ANSWER_S = 300.0
"""How long a process waits for an answer. The connection to a process that is gone closes before."""

HELLO_S = 30.0

SENDERS = 2
"""How many answers are in memory at a time, each of at most a chunk."""

_KEY_BYTES = 32
_HELLO = struct.Struct("!32sI")
_REQUEST = struct.Struct("!II")
_ANSWER = struct.Struct("!I32s")

Read = Callable[[int, int, int], memoryview]
"""The pieces of a chunk that this process sends: (process that writes it, leaf, chunk)."""


class PeerAddress(Struct, frozen=True, array_like=True):
    """Where a process answers requests, and the key that they have to begin with."""

    host: str
    port: int
    key: bytes


class PieceExchange:
    """The end of one process, for one save.

    Args:
        index: The number of this process.

    Attributes:
        address: Where this process listens.
        received: How many bytes of pieces came from other processes.
    """

    def __init__(self, index: int) -> None:
        self.received = 0
        self._index = index
        self._addresses: Sequence[PeerAddress | None] = ()
        self._read: Read | None = None
        self._ready = threading.Event()
        self._senders = threading.BoundedSemaphore(SENDERS)
        self._guard = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._connections: dict[int, socket.socket] = {}
        self._open: set[socket.socket] = set()
        host = own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._open.add(self._listener)
        self.address = PeerAddress(
            host, self._listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES)
        )
        threading.Thread(target=self._accept, name="perdure-pieces", daemon=True).start()

    def begin(self, addresses: Sequence[PeerAddress | None], read: Read) -> None:
        """Answer with what `read` returns, and ask the processes at these addresses."""
        self._addresses, self._read = addresses, read
        self._ready.set()

    def fetch(self, leaf: int) -> Fetch:
        """Gets pieces of the chunks of a leaf."""

        def fetch(process: int, chunk: int, target: memoryview) -> None:
            try:
                self._ask(process, leaf, chunk, target)
            except OSError as error:
                raise OSError(
                    f"no answer from process {process} at {self._addresses[process]}, which has a "
                    f"part of a chunk that this process writes: {error}"
                ) from error

        return fetch

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._ready.set()
        with self._guard:
            still_open, self._open = self._open, set()
        for connection in still_open:
            with suppress(OSError):  # wakes the thread that waits in it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _ask(self, process: int, leaf: int, chunk: int, target: memoryview) -> None:
        with self._guard:
            lock = self._locks.setdefault(process, threading.Lock())
        with lock:
            connection = self._connections.get(process)
            if connection is None:
                connection = self._connections[process] = self._connect(process)
            connection.sendall(_REQUEST.pack(leaf, chunk))
            header = memoryview(bytearray(_ANSWER.size))
            _receive(connection, header)
            size, digest = _ANSWER.unpack(header)
            if size != len(target):
                raise OSError(f"expected {len(target)} bytes, found {size}")
            _receive(connection, target)
            if blake3(target).digest() != digest:
                raise OSError(f"the {size} bytes of its answer do not have the hash that it states")
            self.received += size

    def _connect(self, process: int) -> socket.socket:
        address = self._addresses[process]
        if address is None:
            raise OSError("it does not listen")
        connection = socket.create_connection((address.host, address.port), ANSWER_S)
        self._keep(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(address.key, self._index))
        return connection

    def _keep(self, connection: socket.socket) -> None:
        with self._guard:
            self._open.add(connection)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self._keep(connection)
                threading.Thread(
                    target=self._serve, args=(connection,), name="perdure-pieces", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one process until it closes its connection."""
        with suppress(OSError, LookupError), connection:
            connection.settimeout(HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            key, writer = _HELLO.unpack(_exactly(connection, _HELLO.size))
            if not hmac.compare_digest(key, self.address.key):
                return
            while True:
                connection.settimeout(None)
                leaf, chunk = _REQUEST.unpack(_exactly(connection, _REQUEST.size))
                self._ready.wait()
                if (read := self._read) is None:
                    return
                connection.settimeout(ANSWER_S)
                with self._senders:
                    data = read(writer, leaf, chunk)
                    connection.sendall(_ANSWER.pack(len(data), blake3(data).digest()))
                    connection.sendall(data)


def own_host() -> str:
    """The address of this machine that the other processes of the framework's group reach.

    It is the one from which this machine reaches the group's rendezvous; without a group the loopback.
    """
    group = framework_group()
    if group is None or group.address is None:
        return "127.0.0.1"
    host, _, port = group.address.rpartition(":")
    try:
        found: Any = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return "127.0.0.1"


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the connection was closed")
        target = target[count:]


def _exactly(connection: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    _receive(connection, data)
    return data
