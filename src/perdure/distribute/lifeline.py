"""Notices that a process of a group is gone, by the connection that it keeps to process 0.

A connection closes with its process, and process 0 tells all others. Only a closed connection
counts, and one to a machine that does not answer: a process that is stopped or busy is never taken
for gone.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from perdure.distribute.cluster.rendezvous import listen
from perdure.runtime.system import at_fork

GONE = b"\2"
"""In the place of a value that a process did not set before it was gone."""

_LONGEST_LINE = 2**12
_CONNECT_S = 5.0
# After a connection that could not be accepted.
_RETRY_S = 0.1
# A value that a process wrote before its end may still be on its way to the store.
_GRACE_S = 1.0
# The errors of a connection whose probes nobody answers.
_UNANSWERED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Lifeline:
    """This process's end, with a thread for each connection; `OSError` if process 0 cannot be
    reached.

    All connections to a machine that has not answered for about `silence` seconds are closed.
    `gone` are the numbers of lost processes; `end_wait` stores `GONE` for a key without a value,
    which ends waits for it.
    """

    def __init__(
        self, index: int, host: str, silence: float = 10, address: dict[str, Any] | None = None
    ) -> None:
        self.gone: list[int] = []
        self.end_wait: Callable[[str], None] = lambda _: None
        # The keys that threads of this process wait for, and who sets them.
        self._awaited: dict[str, int] = {}
        self._silence = silence
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._sockets: list[socket.socket] = []
        # In process 0: the others, and what they are told: who is gone, with the address of a machine
        # that does not answer, else "".
        self._members: dict[socket.socket, int] = {}
        self._reports: dict[int, str] = {}
        # A child that is forked must not keep the connections open.
        lifeline = weakref.ref(self)
        at_fork(after_in_child=lambda: _close_in_child(lifeline()))
        if address is None:
            listener = self._kept(listen(host, 0))
            self.address = {"port": listener.getsockname()[1], "token": secrets.token_hex(16)}
            _start(self._accept, listener)
        else:
            self.address = address
            connection = self._kept(socket.create_connection((host, address["port"]), _CONNECT_S))
            probe(connection, silence)
            connection.settimeout(None)
            hello = {"token": address["token"], "index": index}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            _start(self._follow, connection)

    @contextmanager
    def awaiting(self, key: str, process: int) -> Iterator[None]:
        """Surrounds a wait for a key that `process` sets, which ends if that process is gone."""
        with self._guard:
            self._awaited[key] = process
            is_gone = process in self.gone
        try:
            if is_gone:
                self.end_wait(key)
            yield
        finally:
            with self._guard:
                del self._awaited[key]

    def leaving(self) -> None:
        """Process 0 announces that it leaves, so that no process waits for it longer."""
        if os.getpid() == self._pid:
            self._tell(0, "")  # the others have nobody to tell

    def stop(self) -> None:
        """Close the connections: this process leaves. No process is reported after that."""
        if os.getpid() != self._pid:
            return
        self._stopping.set()
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
            connection.close()

    def _kept(self, connection: socket.socket) -> socket.socket:
        self._sockets.append(connection)
        return connection

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
                _start(self._serve, self._kept(connection), address[0])
            except OSError:
                if self._stopping.wait(_RETRY_S):
                    return

    def _serve(self, connection: socket.socket, machine: str) -> None:
        """Process 0: wait until the connection of another process closes."""
        index, silent = None, ""
        try:
            probe(connection, self._silence)
            with connection.makefile("rb") as lines:
                index = self._hello(lines.readline(_LONGEST_LINE))
                if index is not None:
                    with self._guard:
                        self._members[connection] = index
                        for gone, address in self._reports.items():
                            _send(connection, gone, address)
                    lines.read(1)  # nothing more is sent
        except OSError as error:
            silent = machine if is_unanswered(error) else ""
        with self._guard:
            self._members.pop(connection, None)
            is_known = index in self._reports or index in self._members.values()
        self._sockets.remove(connection)
        connection.close()
        if index is not None and not is_known and not self._stopping.is_set():
            self._tell(index, silent)
            self._lost(index, silent)

    def _tell(self, index: int, machine: str) -> None:
        with self._guard:
            self._reports[index] = machine
            for connection in self._members:
                _send(connection, index, machine)

    def _hello(self, line: bytes) -> int | None:
        """The number in the first line of a process; None if that is no process of this group."""
        with suppress(ValueError, TypeError, KeyError):
            hello = json.loads(line)
            if secrets.compare_digest(str(hello["token"]), self.address["token"]):
                return int(hello["index"])
        return None

    def _follow(self, connection: socket.socket) -> None:
        """Every other process: read the messages of process 0 until its connection closes."""
        chief = silent = ""
        try:
            chief = connection.getpeername()[0]
            with connection.makefile("rb") as lines:
                while line := lines.readline(_LONGEST_LINE):
                    index, _, machine = line.decode().strip().partition(" ")
                    self._lost(int(index), machine)
        except OSError as error:
            silent = chief if is_unanswered(error) else ""
        self._lost(0, silent)

    def _lost(self, index: int, machine: str) -> None:
        if not self._stopping.wait(_GRACE_S):
            if machine:
                close_connections(machine)
            with self._guard:
                if index not in self.gone:
                    self.gone.append(index)
                keys = [key for key, setter in self._awaited.items() if setter == index]
            for key in keys:
                self.end_wait(key)


def _start(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, name="perdure-lifeline", daemon=True).start()


def _send(connection: socket.socket, index: int, machine: str) -> None:
    with suppress(OSError):  # a process that is gone meanwhile is reported separately
        connection.send(f"{index} {machine}\n".encode())


def _close_in_child(lifeline: Lifeline | None) -> None:
    for connection in lifeline._sockets if lifeline is not None else ():
        with suppress(OSError):
            os.close(connection.detach())  # `close` would wait for the threads of the parent


def probe(connection: socket.socket, seconds: float) -> None:
    """Let the connection fail when the other machine has not answered for about `seconds`.

    For few bytes: one whose other end is merely stopped would fail, too, once its buffer is full.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel takes whole seconds, up to 32767.
    idle, interval, limit = (
        min(max(1, round(share * seconds)), 32767) for share in (0.4, 0.2, 1.0)
    )
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPALIVE", idle),  # its name on macOS
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", 3),
        # Nothing is probed while bytes are on their way: the report of another machine that is gone.
        ("TCP_USER_TIMEOUT", 1000 * limit),
    ):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_unanswered(error: OSError) -> bool:
    """Whether the connection failed because the other machine does not answer."""
    return error.errno in _UNANSWERED


def close_connections(address: str) -> None:
    """End the TCP connections of this process to a machine, and with them all waits for it."""
    machine = _normal(address)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError, ValueError):  # no socket, not connected, or closed meanwhile
            is_blocking = os.get_blocking(int(name))
            connection = socket.socket(fileno=int(name))
            try:
                os.set_blocking(int(name), is_blocking)  # `setdefaulttimeout` has changed it
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and _normal(connection.getpeername()[0]) == machine:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def _normal(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed
