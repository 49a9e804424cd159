"""Divides the chunks that several processes of one machine need: one reads and verifies each, and the
others copy their elements out of the very bytes that were verified.

Invariant: no restore depends on another process: each reads by itself what it did not get.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from perdure.checkpoint.connections import (
    Connections,
    Slots,
    exactly,
    hello_of,
    received_memory,
)
from perdure.store.format import CHUNK_BYTES

SLOTS = 6
"""How many chunks are in memory until the other processes have copied their elements."""

_NUMBER = struct.Struct("!I")
"""The number of a process, the bytes of a request, or a slot whose elements were copied."""
_DONE = struct.Struct("!QQQ")
"""A verified chunk: its number, its offset in the slot, and its bytes."""
_END = _DONE.pack(0, 2**64 - 1, 0)


class _Request(Struct, frozen=True, array_like=True):
    """The chunks that a process wants to share, by number with their bytes, and bytes read `alone`."""

    fingerprint: str
    wanted: dict[int, int]
    alone: int


_NOTHING = _Request("", {}, 0)


class ChunkSharing:
    """The end of one process of several, for one restore; see `perdure.store.loading.SharedReads`."""

    def __init__(self) -> None:
        self._index = 0
        self._others = set[int]()
        self._name = ""
        self._names: Sequence[str] = ()
        self._peers = Connections("perdure-share")
        self._guard = self._peers.guard
        self._slots = Slots(SLOTS)
        self._listener: socket.socket | None = None
        self._request, self._place = _NOTHING, _ignore
        self._connected: set[int] = set()
        """The peers to which this process has made a connection."""
        self._accepted: set[int] = set()
        """The peers that have made one to this process."""
        self._consumers: dict[int, socket.socket] = {}
        """The connections over which they take chunks from this process, while these are open."""
        self._producers: set[int] = set()
        """The peers that may still hand chunks to this process."""
        self._requests: dict[int, _Request] = {}
        self._takers: dict[int, list[int]] = {}
        """The peers that need a chunk which this process reads, by the number of the chunk."""
        self._held: dict[int, list[int]] = {}
        """By the slot, for each chunk in it the peers that have not copied their elements yet."""
        self._received: set[int] = set()

    def listen(self) -> str:
        """Let others of this machine connect that know the name that this returns; empty where that
        is forbidden. All listen before one reads."""
        name = f"perdure-{secrets.token_hex(16)}"
        if self._slots.file is not None:
            self._listener = self._peers.listen_locally(name)
        self._name = "" if self._listener is None else name
        return self._name

    def meet(self, names: Sequence[str]) -> None:
        """The names of all processes, each in the place of its index."""
        if self._name:
            self._names, self._index = names, names.index(self._name)
            self._others = set(range(len(names))) - {self._index}

    def announce(
        self,
        fingerprint: str,
        wanted: Mapping[int, int],
        alone: int,
        place: Callable[[int, memoryview], None],
    ) -> bool:
        with self._guard:
            if self._listener is None or not self._others or not wanted:
                return False
            self._request, self._place = _Request(fingerprint, dict(wanted), alone), place
            # All connections are made before one is accepted: who has the request of this process
            # knows that its connection is there.
            connections: list[tuple[int, socket.socket]] = []
            hello = _NUMBER.pack(self._index)
            for index in self._others:
                try:
                    connection = self._peers.connect_locally(self._names[index], hello)
                    connections.append((index, connection))
                except OSError:  # it does not listen, or on another machine, or has ended
                    self._requests[index] = _NOTHING
            self._connected = {index for index, _ in connections}
            self._producers = set(self._connected)
            self._peers.accept(self._listener, self._serve)
            for index, connection in connections:
                self._peers.start(self._take, index, connection)
        return bool(connections)

    def divide(self) -> tuple[set[int], set[int]]:

        def is_complete() -> bool:
            wanting = {index for index, request in self._requests.items() if request.wanted}
            connected = self._accepted | (wanting - self._producers)  # or gone
            return self._requests.keys() == self._others and wanting <= connected

        with self._guard:
            self._guard.wait_for(is_complete)
            others: set[int] = set()
            for number, group in _readers({**self._requests, self._index: self._request}):
                if group[0] == self._index:
                    self._takers[number] = group[1:]
                elif self._index in group:
                    others.add(number)
            return others, {number for number, group in self._takers.items() if group}

    def take(self) -> tuple[int, memoryview]:
        slot = self._slots.free.get()
        return slot, self._slots.memory(slot)

    def give(self, slot: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        with self._guard:
            messages = [
                (index, _DONE.pack(number, slot * CHUNK_BYTES + start, nbytes))
                for number, start, nbytes in chunks
                for index in self._takers.get(number, ())
                if index in self._consumers
            ]
            self._held[slot] = [index for index, _ in messages]
            for index, message in messages:
                self._send(index, message)
            self._free()

    def finish(self) -> set[int]:
        with self._guard:
            for index in self._consumers:
                self._send(index, _END)
            self._guard.wait_for(lambda: not self._producers and not self._held)
            return self._received

    def close(self) -> None:
        self._peers.close()
        self._listener = None
        self._place = _ignore  # it refers to the shards
        self._slots.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the request of a peer, and learn which chunks it has copied, until it closes."""
        index = -1
        with suppress(OSError, LookupError, ValueError):
            (caller,) = _NUMBER.unpack(hello_of(connection, _NUMBER.size))
            with self._guard:
                if caller in self._accepted or caller not in self._others:
                    raise ConnectionRefusedError
                index = caller
                body = msgspec.msgpack.encode(
                    self._request if index in self._connected else _NOTHING
                )
                self._slots.share(connection)
                connection.sendall(_NUMBER.pack(len(body)) + body)
                self._consumers[index] = connection
                self._accepted.add(index)
                self._guard.notify_all()
            while True:
                (slot,) = _NUMBER.unpack(exactly(connection, _NUMBER.size))
                with self._guard:
                    self._held[slot].remove(index)
                    self._free()
        with self._guard:
            if self._consumers.pop(index, None) is not None:
                for slot, left in self._held.items():
                    self._held[slot] = [other for other in left if other != index]
                self._free()
        connection.close()

    def _take(self, index: int, connection: socket.socket) -> None:
        """Copy elements of the chunks that a peer hands out, until it ends."""
        with suppress(OSError, ValueError, struct.error):
            memory = received_memory(connection, SLOTS * CHUNK_BYTES)
            (size,) = _NUMBER.unpack(exactly(connection, _NUMBER.size))
            request = msgspec.msgpack.decode(exactly(connection, size), type=_Request)
            is_same = request.fingerprint == self._request.fingerprint
            with self._guard:
                self._requests[index] = request if is_same else _NOTHING
                self._guard.notify_all()
            while (message := exactly(connection, _DONE.size)) != _END:
                number, start, nbytes = _DONE.unpack(message)
                data = memory[start : start + nbytes]
                if self._request.wanted.get(number) != nbytes or len(data) != nbytes:
                    raise ConnectionAbortedError
                self._place(number, data)
                # If this fails, the peer may have used the memory again: then it did not come.
                connection.sendall(_NUMBER.pack(start // CHUNK_BYTES))
                with self._guard:
                    self._received.add(number)
        with self._guard:
            self._requests.setdefault(index, _NOTHING)
            self._producers.discard(index)
            self._guard.notify_all()

    def _send(self, index: int, message: bytes) -> None:
        with suppress(OSError):  # the thread that serves the peer learns that it is gone
            self._consumers[index].sendall(message)

    def _free(self) -> None:
        """Let slots be used again whose chunks all have copied."""
        for slot in [slot for slot, left in self._held.items() if not left]:
            del self._held[slot]
            self._slots.free.put(slot)
        self._guard.notify_all()


def _readers(requests: Mapping[int, _Request]) -> Iterator[tuple[int, list[int]]]:
    """The number of each chunk that several processes want, and these processes; the first one, which
    has the least to read, reads it."""
    wanting: dict[int, list[int]] = {}
    for index in sorted(requests):
        for number in requests[index].wanted:
            wanting.setdefault(number, []).append(index)
    load = {index: request.alone for index, request in requests.items()}
    shared = []
    for number, group in sorted(wanting.items()):
        if len(group) > 1:
            shared.append((number, group))
        else:
            load[group[0]] += requests[group[0]].wanted[number]
    for number, group in shared:
        reader = min(group, key=lambda index: (load[index], index))
        load[reader] += requests[reader].wanted[number]
        yield number, [reader, *(index for index in group if index != reader)]


def _ignore(number: int, data: memoryview) -> None:
    """The default of `place`."""
