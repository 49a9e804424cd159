"""Moves slices of chunks, when needed, from processes that have them to processes that write them.

The chief hands out the addresses with a key. Processes of one machine answer in shared memory;
through the network every answer carries its hash.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from blake3 import blake3
from msgspec import Struct

from perdure.checkpoint.connections import (
    HAS_SHARED_MEMORY,
    Connections,
    Slots,
    exactly,
    hello_of,
    received_memory,
)
from perdure.runtime.process_group import framework_group
from perdure.store.format import CHUNK_BYTES
from perdure.store.shard_plan import Fetch

ANSWER_S = 300.0
"""How long a process waits for an answer. The connection to a process that is gone closes before."""

SLOTS = 2
"""How many answers are in memory at a time, each of at most a chunk."""

_KEY_BYTES = 32
_HELLO = struct.Struct("!32sI")
_REQUEST = struct.Struct("!II")
_ANSWER = struct.Struct("!I32s")
_PLACED = struct.Struct("!II")
"""An answer in shared memory: how many bytes, and in which slot."""
_DONE = b"\0"
"""What a process sends once it does not need the shared memory of an answer any more."""

Read = Callable[[int, int, int, memoryview], int]
"""Fills memory with the slices of a chunk that this process sends: (process that writes it, leaf,
chunk, memory). Returns how many bytes they have."""


class PeerAddress(Struct, frozen=True, array_like=True):
    """Where a process answers requests that begin with the key; `local` is its socket, if any."""

    host: str
    port: int
    key: bytes
    local: str = ""


class _Connection(NamedTuple):
    """A connection to a process, and the shared memory for its answers, if there is any."""

    socket: socket.socket
    memory: memoryview | None


class SliceExchange:
    """The end of one process, for one save: where it listens, and how many bytes it has received."""

    def __init__(self, index: int) -> None:
        self.received = 0
        self._index = index
        self._addresses: Sequence[PeerAddress | None] = ()
        self._read: Read | None = None
        self._ready = threading.Event()
        self._peers = Connections("perdure-slices")
        self._guard = self._peers.guard
        self._idle: dict[int, list[_Connection]] = {}
        self._slots = Slots(SLOTS)
        host = own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = self._peers.keep(socket.create_server((host, 0), family=family, backlog=1024))
        self._peers.accept(listener, self._serve)
        name = f"perdure-{secrets.token_hex(16)}"
        local = None if self._slots.file is None else self._peers.listen_locally(name)
        if local is not None:
            self._peers.accept(local, self._serve)
        key = secrets.token_bytes(_KEY_BYTES)
        port = listener.getsockname()[1]
        self.address = PeerAddress(host, port, key, name if local is not None else "")

    def begin(self, addresses: Sequence[PeerAddress | None], read: Read) -> None:
        """Answer with what `read` gives, and ask the processes at these addresses."""
        self._addresses, self._read = addresses, read
        self._ready.set()

    def fetch(self, leaf: int) -> Fetch:
        """Gets slices of the chunks of a leaf."""

        def fetch(process: int, chunk: int, size: int, place: Callable[[memoryview], None]) -> None:
            try:
                self._ask(process, _REQUEST.pack(leaf, chunk), size, place)
            except OSError as error:
                found = self._addresses[process]
                where = f"{found.host}:{found.port}" if found else "no address"
                raise OSError(
                    f"no answer from process {process} at {where}, which has a part of a chunk that "
                    f"this process writes: {error}"
                ) from error

        return fetch

    def close(self) -> None:
        """Stop listening, and close all connections."""
        # `read` refers to the part of the save that has this exchange, and to its state.
        self._read = None
        self._ready.set()
        self._peers.close()
        self._idle.clear()
        self._slots.close()

    def _ask(
        self, process: int, request: bytes, size: int, place: Callable[[memoryview], None]
    ) -> None:
        with self._guard:
            idle = self._idle.setdefault(process, [])
            found = idle.pop() if idle else None
        connection, memory = found or self._connect(process)
        connection.sendall(request)
        if memory is not None:
            answered, slot = _PLACED.unpack(exactly(connection, _PLACED.size))
            _require_size(answered, size)
            start = slot * CHUNK_BYTES
            place(memory[start : start + size])
            connection.sendall(_DONE)
        else:
            answered, digest = _ANSWER.unpack(exactly(connection, _ANSWER.size))
            _require_size(answered, size)
            data = exactly(connection, size)
            if blake3(data).digest() != digest:
                raise OSError(f"the {size} bytes of its answer do not have the hash that it states")
            place(data)
        with self._guard:
            idle.append(_Connection(connection, memory))
            self.received += size

    def _connect(self, process: int) -> _Connection:
        address = self._addresses[process]
        if address is None:
            raise OSError("it does not listen")
        hello = _HELLO.pack(address.key, self._index)
        if address.local and HAS_SHARED_MEMORY:
            with suppress(OSError, ValueError):
                # Else it is another machine, a container with a network of its own, or a file that may
                # not be passed.
                here = self._peers.connect_locally(address.local, hello, ANSWER_S)
                return _Connection(here, received_memory(here, SLOTS * CHUNK_BYTES))
        there = socket.create_connection((address.host, address.port), ANSWER_S)
        connection = self._peers.keep(there)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(hello)
        return _Connection(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one process until it closes its connection."""
        is_local = connection.family == socket.AF_UNIX
        with suppress(OSError, LookupError), connection:
            key, writer = _HELLO.unpack(hello_of(connection, _HELLO.size))
            if not hmac.compare_digest(key, self.address.key):
                return
            if not is_local:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                self._slots.share(connection)
            while True:
                connection.settimeout(None)
                leaf, chunk = _REQUEST.unpack(exactly(connection, _REQUEST.size))
                self._ready.wait()
                if (read := self._read) is None:
                    return
                connection.settimeout(ANSWER_S)
                slot = self._slots.free.get()
                memory = self._slots.memory(slot)
                try:
                    size = read(writer, leaf, chunk, memory)
                    if is_local:
                        connection.sendall(_PLACED.pack(size, slot))
                        exactly(connection, len(_DONE))
                    else:
                        data = memory[:size]
                        connection.sendall(_ANSWER.pack(size, blake3(data).digest()))
                        connection.sendall(data)
                except BaseException:
                    # Before the slot is used again: its reader then learns that it came too late.
                    connection.close()
                    raise
                finally:
                    self._slots.free.put(slot)


def own_host() -> str:
    """The address from which this machine reaches the framework's rendezvous; else loopback."""
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


def _require_size(answered: int, expected: int) -> None:
    if answered != expected:
        raise OSError(f"expected {expected} bytes, found {answered}")
