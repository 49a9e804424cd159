"""The roll call: who came, before any framework waits for all.

Owns the first meeting of a group. Invariant: every process that came in time leaves it with the same
answer: the whole group, or one error that names who is missing and who came twice.

Process 0 listens where the framework's own service will listen a moment later. The others connect and
say who they are, one JSON object on a line; process 0 answers with an empty line at once, and in the
end with the members or with what is wrong.
Nothing but text is exchanged, and the frameworks do not take part: their own limits end in errors
that do not know names, or in an abort of the process.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from perdure.distribute.cluster.cluster_spec import Cluster
from perdure.errors import ClusterError

_HELLO = "perdure-roll-call-1"
_HEARD = b"\n"
_LONGEST_LINE = 2**16
# Between two attempts to reach process 0, which may start later.
_RETRY_S = 0.05
_SLOWEST_RETRY_S = 1.0
# For what takes no time unless something is broken.
_SHORT_S = 5.0
# For the rest to come and hear that something is wrong.
_GRACE_S = 1.0


@dataclass(frozen=True)
class Member:
    """A process that came."""

    index: int
    count: int
    host: str
    pid: int
    source: str

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


def await_members(cluster: Cluster, start_timeout: float) -> tuple[Member, ...]:
    """All members of the group, by number, once all have come; at most `start_timeout` seconds.

    Raises ClusterError, in every process that came, when one is missing after that time, when two
    claim one number, or when they do not agree how many they are.
    """
    own = Member(
        cluster.process_id, cluster.num_processes, socket.gethostname(), os.getpid(), cluster.source
    )
    deadline = time.monotonic() + start_timeout
    if cluster.is_chief:
        with _listening(cluster) as listener:
            if listener is not None:
                return _Rendezvous(cluster, own, listener).take(deadline, start_timeout)
        # Somebody has the port. If that is another process 0, it will say so.
    return _answer_roll(cluster, own, deadline, start_timeout)


class _Rendezvous:
    """Process 0's side."""

    def __init__(self, cluster: Cluster, own: Member, listener: socket.socket) -> None:
        self._cluster = cluster
        self._own = own
        self._listener = listener
        self._said: dict[socket.socket, bytes] = {}
        self._members: dict[socket.socket, Member] = {}

    def take(self, deadline: float, limit: float) -> tuple[Member, ...]:
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            stack.callback(self._close)
            wrong = ""
            while len({m.index for m in self._members.values()} | {0}) < self._own.count:
                left = deadline - time.monotonic()
                if left <= 0:
                    wrong = wrong or self._missing(limit)
                    break
                for key, _ in selector.select(left):
                    connection: Any = key.fileobj
                    if connection is self._listener:
                        self._accept(selector)
                    elif not self._hear(connection):
                        selector.unregister(connection)
                        self._forget(connection)
                if not wrong and (wrong := self._wrong()):
                    # Those who start at the same time as these are to hear it too.
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            members = sorted([self._own, *self._members.values()], key=lambda m: m.index)
            answer = {"error": wrong} if wrong else {"members": [vars(m) for m in members]}
            self._tell(answer)
        if wrong:
            raise ClusterError(wrong)
        return tuple(members)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._said[connection] = b""
            selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> bool:
        """False when the other side is gone, or is no process of a group."""
        try:
            data = connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        said = self._said[connection] = self._said[connection] + data
        if not data or len(said) > _LONGEST_LINE:
            return False
        if said.endswith(b"\n") and connection not in self._members:
            member = _decode(said)
            if member is None:
                return False
            self._members[connection] = member
            with suppress(OSError):  # who is gone already is forgotten by the next look
                connection.send(_HEARD)
        return True

    def _forget(self, connection: socket.socket) -> None:
        self._said.pop(connection)
        self._members.pop(connection, None)
        connection.close()

    def _wrong(self) -> str:
        by_index: dict[int, Member] = {self._own.index: self._own}
        for member in self._members.values():
            if member.count != self._own.count:
                return (
                    f"the processes do not agree how many they are: {self._own} expects "
                    f"{self._own.count} (from {self._own.source}), {member} expects {member.count} "
                    f"(from {member.source})"
                )
            other = by_index.setdefault(member.index, member)
            if other is not member:
                return (
                    f"two processes claim the number {member.index}: pid {other.pid} on {other.host} "
                    f"(from {other.source}) and pid {member.pid} on {member.host} (from "
                    f"{member.source}). Every process needs its own number, 0 to {member.count - 1}"
                )
        return ""

    def _missing(self, limit: float) -> str:
        here = {self._own.index: self._own, **{m.index: m for m in self._members.values()}}
        absent = [p for p in range(self._cluster.num_processes) if p not in here]
        names = ", ".join(self._cluster.name(process) for process in absent[:20])
        names += f" and {len(absent) - 20} more" if len(absent) > 20 else ""
        present = ", ".join(str(here[process]) for process in sorted(here)[:20])
        alone = (
            f" Nobody came at all: is {self._cluster.coordinator} (from {self._cluster.source}) an "
            "address of this host that the others reach?"
            if len(here) == 1
            else ""
        )
        return (
            f"after {limit:g} s {len(absent)} of {self._cluster.num_processes} processes had not "
            f"come: {names}. Here are {present}.{alone} Look at the logs of the missing ones, or wait "
            "longer: ClusterOptions(start_timeout=...), PERDURE_START_TIMEOUT"
        )

    def _tell(self, answer: dict[str, Any]) -> None:
        line = json.dumps(answer).encode() + b"\n"
        for connection in self._members:
            with suppress(OSError):
                connection.settimeout(_SHORT_S)
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
        # The others close first: a port is kept busy for a while on the side that does.
        for connection in self._members:
            with suppress(OSError):
                connection.recv(1)

    def _close(self) -> None:
        for connection in self._said:
            connection.close()


def _answer_roll(
    cluster: Cluster, own: Member, deadline: float, limit: float
) -> tuple[Member, ...]:
    """The others' side."""
    pause, last, told = _RETRY_S, "", False

    def tell() -> None:
        # Only time can tell a group that runs from the end of an earlier one, so it is no error yet.
        nonlocal told
        if not told:
            told = True
            warnings.warn(
                f"{own}: {_no_roll(cluster, own)}. It is asked again for up to {limit:g} s.",
                stacklevel=4,
            )

    while True:
        try:
            said = _ask(cluster, own, max(deadline - time.monotonic(), _SHORT_S) + limit, tell)
        except OSError as error:
            last = str(error) or type(error).__name__
        else:
            answer = _object(said)
            if "error" in answer:
                raise ClusterError(str(answer["error"]))
            if "members" in answer:
                return tuple(Member(**member) for member in answer["members"])
            tell()
            last = _no_roll(cluster, own)
        left = deadline - time.monotonic()
        if left <= 0 and cluster.is_chief:
            raise ClusterError(
                f"{own} cannot listen at {cluster.coordinator} (from {cluster.source}): the port is "
                f"taken, and not by a process of this group. Give the group another port: {last}"
            )
        if left <= 0:
            raise ClusterError(
                f"{own} of {own.count} waited {limit:g} s for process 0 at {cluster.coordinator} "
                f"(from {cluster.source}), which never answered: {last}. Look whether process 0 runs "
                "and whether this host reaches it, or wait longer: ClusterOptions(start_timeout=...), "
                "PERDURE_START_TIMEOUT"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, _SLOWEST_RETRY_S)


def _no_roll(cluster: Cluster, own: Member) -> str:
    return (
        f"what listens at {cluster.coordinator} calls no roll: a group that has started already (does "
        f"another process claim number {own.index}?), or another program"
    )


def _ask(cluster: Cluster, own: Member, wait: float, silent: Callable[[], None]) -> bytes:
    """What process 0 says once it knows; process 0 may have started later, and wait longer.

    Calls `silent` when not even the hello is answered: PyTorch's store takes it and says nothing.
    """
    with socket.create_connection(cluster.host_port, _SHORT_S) as connection:
        connection.sendall(json.dumps({"hello": _HELLO, **vars(own)}).encode() + b"\n")
        try:
            parts = [connection.recv(len(_HEARD))]
        except TimeoutError:
            silent()
            parts = []
        connection.settimeout(wait)
        while data := connection.recv(_LONGEST_LINE):
            parts.append(data)
        return b"".join(parts)


def listen(port: int) -> socket.socket:
    """A listener on all addresses of this host, as the frameworks' own; port 0 takes a free one."""
    six = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port),
        family=socket.AF_INET6 if six else socket.AF_INET,
        dualstack_ipv6=six,
        backlog=1024,
    )


@contextmanager
def _listening(cluster: Cluster) -> Iterator[socket.socket | None]:
    """A listener on the coordinator's port. None if that is taken."""
    port = cluster.host_port[1]
    try:
        listener = listen(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ClusterError(
                f"process 0 cannot listen on port {port} of this host (from {cluster.source}): {error}"
            ) from error
        yield None
        return
    with listener:
        listener.setblocking(False)
        yield listener


def _decode(line: bytes) -> Member | None:
    said = _object(line)
    if said.pop("hello", None) != _HELLO:
        return None
    try:
        member = Member(**said)
    except TypeError:
        return None
    fits = isinstance(member.index, int) and isinstance(member.count, int)
    return member if fits and 0 <= member.index < member.count else None


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
