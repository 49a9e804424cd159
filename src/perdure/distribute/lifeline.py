"""Notices that a process of a group is gone, by the connection that it keeps to process 0.

A connection closes with its process, however that ends. Process 0 then sends the number of that process
to all others. Only a closed connection counts, and one to a machine that does not answer any more: a
process that is silent, stopped or busy is not gone.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from perdure.distribute.cluster.listener import listen
from perdure.distribute.silent_machine import close_connections, is_unanswered, probe

_LONGEST_LINE = 2**12
_CONNECT_S = 5.0
# Between two checks whether process 0 listens already.
_LOOK_S = 0.2
# A value that a process wrote before its end may still be on its way to the store.
_GRACE_S = 1.0


class Lifeline:
    """This process's end: a thread that calls `on_gone` with the number of each process that is gone.

    `publish` stores the address of process 0 for the others, and `look` reads it (None until it is
    there). Process 0 listens at `host`, where the others reach it. A machine that has not answered for
    about `silence` seconds is gone: all connections of this process to it are closed then.

    Raises `OSError` if process 0 listens and cannot be reached.
    """

    def __init__(
        self,
        index: int,
        host: str,
        publish: Callable[[bytes], None],
        look: Callable[[], bytes | None],
        on_gone: Callable[[int], None],
        silence: float = 10,
    ) -> None:
        self._index = index
        self._host = host
        self._look = look
        self._on_gone = on_gone
        self._silence = silence
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._sockets: list[socket.socket] = [self._wake, self._woken]
        # The processes that are gone; with the address of a machine that does not answer, else "".
        self._gone: dict[int, str] = {}
        self._connecting = threading.Lock()
        self._connection: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._token = ""
        if index == 0:
            self._listener = self._kept(listen(host, 0))
            self._token = secrets.token_hex(16)
            port = self._listener.getsockname()[1]
            publish(json.dumps({"port": port, "token": self._token}).encode())
        # A child that is forked must not keep the connection open.
        lifeline = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_all(lifeline()))
        # Here if process 0 listens already, so that it notices even an early end of this process.
        self.connect()
        run = self._serve if index == 0 else self._follow
        self._thread = threading.Thread(target=run, name="perdure-lifeline", daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket | None:
        """The connection to process 0, made now if it listens by now; cheap when called again.

        Raises `OSError` if process 0 listens and cannot be reached.
        """
        if self._connection is None and self._index != 0:
            with self._connecting:
                if self._connection is None:
                    self._connection = self._new_connection()
        return self._connection

    def leaving(self) -> None:
        """Process 0 announces that it leaves, so that no process waits for it longer."""
        if os.getpid() == self._pid and self._index == 0:
            with suppress(OSError):
                self._wake.send(b"\0")

    def stop(self) -> None:
        """Close the connection: this process leaves. No process is reported after that."""
        if os.getpid() != self._pid:
            return
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(2 * _CONNECT_S)
        _close_all(self)

    def close_sockets(self) -> None:
        """Close this process's ends, in a forked child too."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.close()

    def _kept(self, connection: socket.socket) -> socket.socket:
        self._sockets.append(connection)
        return connection

    def _serve(self) -> None:
        """Process 0: read the connection of each other process until it closes."""
        listener: Any = self._listener
        members: dict[socket.socket, int] = {}
        received: dict[socket.socket, bytes] = {}
        addresses: dict[socket.socket, str] = {}
        with selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(listener, selectors.EVENT_READ)
            while not self._stopping.is_set():
                for key, _ in selector.select():
                    connection: Any = key.fileobj
                    if connection is self._woken:
                        self._woken.recv(1)
                        if not self._stopping.is_set():
                            self._gone[0] = ""  # for members whose hello has not been read yet
                            for member in members:
                                _send(member, 0, "")
                        continue
                    if connection is listener:
                        with suppress(OSError):
                            new, address = listener.accept()
                            self._kept(new).setblocking(False)
                            probe(new, self._silence)
                            received[new], addresses[new] = b"", address[0]
                            selector.register(new, selectors.EVENT_READ)
                        continue
                    data, silent = _received(connection)
                    if data is None:
                        continue
                    if connection in members and not data:
                        address = addresses[connection] if silent else ""
                        self._report(members.pop(connection), address, members)
                    elif connection not in members and data:
                        received[connection] += data
                        index = self._hello(received[connection])
                        if index is None:
                            if len(received[connection]) < _LONGEST_LINE:
                                continue
                            data = b""
                        else:
                            members[connection] = index
                            for gone, address in self._gone.items():
                                _send(connection, gone, address)
                    if not data:
                        selector.unregister(connection)
                        received.pop(connection, None)
                        addresses.pop(connection, None)
                        self._sockets.remove(connection)
                        connection.close()

    def _report(self, index: int, address: str, members: dict[socket.socket, int]) -> None:
        if index in self._gone or index in members.values():
            return
        self._gone[index] = address
        for connection in members:
            _send(connection, index, address)
        self._lost(index, address)

    def _lost(self, index: int, address: str) -> None:
        """`address`: of a machine that does not answer, else ""."""
        if not self._stopping.wait(_GRACE_S):
            if address:  # first, because `on_gone` may send something to that machine
                close_connections(address)
            self._on_gone(index)

    def _hello(self, text: bytes) -> int | None:
        line, end, _ = text.partition(b"\n")
        if end:
            with suppress(ValueError, TypeError, KeyError):
                hello = json.loads(line)
                if secrets.compare_digest(str(hello["token"]), self._token):
                    return int(hello["index"])
        return None

    def _follow(self) -> None:
        """Every other process: read the messages of process 0 until its connection closes."""
        with suppress(OSError):
            while (connection := self.connect()) is None:
                if self._stopping.wait(_LOOK_S):
                    self.connect()  # the others learn that this process leaves
                    return
            for index, address in self._processes_gone(connection):
                self._lost(index, address)

    def _new_connection(self) -> socket.socket | None:
        """A connection to process 0; None while it does not listen yet."""
        text = self._look()
        if text is None:
            return None
        address = json.loads(text)
        connection = self._kept(socket.create_connection((self._host, address["port"]), _CONNECT_S))
        probe(connection, self._silence)
        connection.settimeout(None)
        hello = {"token": address["token"], "index": self._index}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return connection

    def _processes_gone(self, connection: socket.socket) -> Iterator[tuple[int, str]]:
        """The processes that are gone, with their machine if that does not answer: those that process 0
        names, and process 0 itself."""
        rest, chief = b"", ""
        with suppress(OSError):  # process 0 may be gone already
            chief = connection.getpeername()[0]
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    return
                data, silent = _received(connection)
                if not data:
                    yield 0, chief if silent else ""
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    index, _, address = line.decode().partition(" ")
                    yield int(index), address


def _received(connection: socket.socket) -> tuple[bytes | None, bool]:
    """The bytes that came: empty if the other side is gone, None if nothing came after all. And whether
    the other side is gone because its machine does not answer."""
    try:
        return connection.recv(_LONGEST_LINE), False
    except BlockingIOError:
        return None, False
    except OSError as error:
        return b"", is_unanswered(error)


def _send(connection: socket.socket, index: int, address: str) -> None:
    with suppress(OSError):  # a process that is gone meanwhile is reported separately
        connection.send(f"{index} {address}\n".encode())


def _close_all(lifeline: Lifeline | None) -> None:
    if lifeline is not None:
        lifeline.close_sockets()
