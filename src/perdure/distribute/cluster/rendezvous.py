"""The first contact of the processes of a group, before any framework waits for all of them.

Every process that comes in time gets the same answer: the group, or one error that names who is
missing or came twice; the limits of frameworks end in errors without names, or in an abort. Process
0 listens where the framework's service will listen. The others send their number, host and process
id as a line of JSON; it answers with an empty line at once, and finally with the members or an
error.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from perdure.distribute.cluster.cluster_spec import Cluster
from perdure.errors import ClusterError
from perdure.text import few

ALL = ""
"""Stands for every address of this machine."""

_ACKNOWLEDGED = b"\n"
_LONGEST_LINE = 2**16
# Between two attempts to reach process 0, which may start later.
_RETRY_S = 0.05
_SLOWEST_RETRY_S = 1.0
# For operations that take no time unless something is broken.
_SHORT_S = 5.0
# For the other processes to come and get the error.
_GRACE_S = 1.0


class Member(msgspec.Struct, frozen=True, tag_field="hello", tag="perdure-roll-call-1"):
    """A process that came. `lifeline`: the address at which process 0 notices the end of the others."""

    index: int
    count: int
    host: str
    pid: int
    source: str
    lifeline: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


class _Answer(msgspec.Struct):
    """What every process gets in the end."""

    error: str = ""
    members: tuple[Member, ...] = ()


def await_members(
    cluster: Cluster, start_timeout: float, lifeline: dict[str, Any] | None = None
) -> tuple[Member, ...]:
    """Wait `start_timeout` seconds for all processes; returns the members in the order of their
    numbers.

    Process 0 gives its `lifeline` address to the others. Raises ClusterError in every process that
    came if one is missing, two have one number, or they disagree on how many there are.
    """
    this_process = Member(
        cluster.process_id,
        cluster.num_processes,
        socket.gethostname(),
        os.getpid(),
        cluster.source,
        lifeline,
    )
    deadline = time.monotonic() + start_timeout
    if cluster.is_chief:
        host, port = cluster.host_port
        try:
            listener = listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ClusterError(
                    f"process 0 cannot listen on port {port} of this host (from {cluster.source}): "
                    f"{error}"
                ) from error
            # The port is taken. If another process 0 has it, it answers with an error.
        else:
            with listener:
                listener.setblocking(False)
                return _Rendezvous(cluster, this_process, listener).run(deadline, start_timeout)
    return _register(cluster, this_process, deadline, start_timeout)


class _Rendezvous:
    """Process 0's side."""

    def __init__(self, cluster: Cluster, chief: Member, listener: socket.socket) -> None:
        self._cluster = cluster
        self._chief = chief
        self._listener = listener
        self._received: dict[socket.socket, bytes] = {}
        self._members: dict[socket.socket, Member] = {}

    def run(self, deadline: float, limit: float) -> tuple[Member, ...]:
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            stack.callback(lambda: [connection.close() for connection in self._received])
            error = ""
            while len({m.index for m in self._members.values()} | {0}) < self._chief.count:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    error = error or self._missing(limit)
                    break
                for key, _ in selector.select(remaining):
                    connection: Any = key.fileobj
                    if connection is self._listener:
                        with suppress(OSError):
                            new, _ = self._listener.accept()
                            new.setblocking(False)
                            self._received[new] = b""
                            selector.register(new, selectors.EVENT_READ)
                    elif not self._read(connection):
                        selector.unregister(connection)
                        self._received.pop(connection)
                        self._members.pop(connection, None)
                        connection.close()
                if not error and (error := self._contradiction()):
                    # Processes that start at about the same time get the error too.
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            # Before the answer: what connects to the port from now on means the framework's service. In
            # the backlog of this listener its connection would be reset.
            selector.unregister(self._listener)
            self._listener.close()
            members = sorted([self._chief, *self._members.values()], key=lambda m: m.index)
            self._answer(_Answer(error) if error else _Answer(members=tuple(members)))
        if error:
            raise ClusterError(error)
        return tuple(members)

    def _read(self, connection: socket.socket) -> bool:
        """False if the other side is gone, or is not a process of a group."""
        try:
            data = connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        received = self._received[connection] = self._received[connection] + data
        if not data or len(received) > _LONGEST_LINE:
            return False
        if received.endswith(b"\n") and connection not in self._members:
            member = _decode(received)
            if member is None:
                return False
            self._members[connection] = member
            with suppress(OSError):  # a closed connection is removed by the next read
                connection.send(_ACKNOWLEDGED)
        return True

    def _contradiction(self) -> str:
        by_index: dict[int, Member] = {self._chief.index: self._chief}
        for member in self._members.values():
            if member.count != self._chief.count:
                return (
                    f"the processes disagree on how many there are: {self._chief} expects "
                    f"{self._chief.count} (from {self._chief.source}), {member} expects {member.count} "
                    f"(from {member.source})"
                )
            other = by_index.setdefault(member.index, member)
            if other is not member:
                return (
                    f"two processes have the number {member.index}: pid {other.pid} on {other.host} "
                    f"(from {other.source}) and pid {member.pid} on {member.host} (from "
                    f"{member.source}). Every process needs its own number, 0 to {member.count - 1}"
                )
        return ""

    def _missing(self, limit: float) -> str:
        members = {self._chief.index: self._chief, **{m.index: m for m in self._members.values()}}
        absent = [p for p in range(self._cluster.num_processes) if p not in members]
        names = few((self._cluster.name(process) for process in absent), 20)
        present = ", ".join(str(members[process]) for process in sorted(members)[:20])
        alone = (
            f" Nobody came at all: is {self._cluster.coordinator} (from {self._cluster.source}) an "
            "address of this host that the others reach?"
            if len(members) == 1
            else ""
        )
        return (
            f"after {limit:g} s {len(absent)} of {self._cluster.num_processes} processes had not "
            f"come: {names}. Here are {present}.{alone} Look at the logs of the missing ones, or wait "
            "longer: ClusterOptions(start_timeout=...), PERDURE_START_TIMEOUT"
        )

    def _answer(self, answer: _Answer) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        for connection in self._members:
            with suppress(OSError):
                connection.settimeout(_SHORT_S)
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
        # The others close first: the side that closes first keeps the port busy for a while.
        for connection in self._members:
            with suppress(OSError):
                connection.recv(1)


def _register(
    cluster: Cluster, member: Member, deadline: float, limit: float
) -> tuple[Member, ...]:
    """The other processes' side."""
    pause, last, warned = _RETRY_S, "", False

    def warn() -> None:
        # Only time distinguishes a running group from the end of an earlier one, so it is no error yet.
        nonlocal warned
        if not warned:
            warned = True
            warnings.warn(
                f"{member}: {_no_rendezvous(cluster, member)}. Trying again for up to {limit:g} s.",
                stacklevel=4,
            )

    while True:
        try:
            wait = max(deadline - time.monotonic(), _SHORT_S) + limit
            text = _ask(cluster, member, wait, warn)
        except OSError as error:
            last = str(error) or type(error).__name__
        else:
            answer = _Answer()
            with suppress(msgspec.DecodeError):
                answer = msgspec.json.decode(text, type=_Answer)
            if answer.error:
                raise ClusterError(answer.error)
            if answer.members:
                return answer.members
            warn()
            last = _no_rendezvous(cluster, member)
        left = deadline - time.monotonic()
        if left <= 0 and cluster.is_chief:
            raise ClusterError(
                f"{member} cannot listen at {cluster.coordinator} (from {cluster.source}): the port is "
                f"taken, and not by a process of this group. Give the group another port: {last}"
            )
        if left <= 0:
            raise ClusterError(
                f"{member} of {member.count} waited {limit:g} s for process 0 at {cluster.coordinator} "
                f"(from {cluster.source}), which never answered: {last}. Check that process 0 runs "
                "and that this host reaches it, or wait longer: ClusterOptions(start_timeout=...), "
                "PERDURE_START_TIMEOUT"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, _SLOWEST_RETRY_S)


def _no_rendezvous(cluster: Cluster, member: Member) -> str:
    return (
        f"no rendezvous answers at {cluster.coordinator}: the port belongs to a group that has started "
        f"already (does another process have number {member.index}?), or to another program"
    )


def _ask(cluster: Cluster, member: Member, wait: float, silent: Callable[[], None]) -> bytes:
    """The final answer of process 0, which may have started later and may wait longer.

    Calls `silent` if the hello is not acknowledged: PyTorch's store reads it and does not answer.
    """
    with socket.create_connection(cluster.host_port, _SHORT_S) as connection:
        connection.sendall(msgspec.json.encode(member) + b"\n")
        try:
            parts = [connection.recv(len(_ACKNOWLEDGED))]
        except TimeoutError:
            silent()
            parts = []
        connection.settimeout(wait)
        while data := connection.recv(_LONGEST_LINE):
            parts.append(data)
        return b"".join(parts)


def _decode(line: bytes) -> Member | None:
    with suppress(msgspec.DecodeError):
        member = msgspec.json.decode(line, type=Member)
        return member if 0 <= member.index < member.count else None
    return None


def listen(host: str, port: int) -> socket.socket:
    """A listener at the address of this machine that `host` names; port 0 takes a free one."""
    address = local_address(host)
    if address == ALL:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server((ALL, port), family=family, dualstack_ipv6=dual, backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def local_address(host: str) -> str:
    """The address of this machine that `host` names; `ALL` if no address here is certain to be
    meant.

    That is a forwarder in front of this machine, or a name that means the loopback here: many
    systems give their own name the address 127.0.1.1.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ALL
    # IPv4 first: a process without IPv6 is more likely than one without IPv4.
    for address in sorted({str(entry[4][0]) for entry in found}, key=lambda text: ":" in text):
        if ipaddress.ip_address(address).is_loopback and not _means_loopback(host):
            return ALL
        if _is_local(address):
            return address
    return ALL


def _means_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().partition(".")[0] == "localhost"


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
