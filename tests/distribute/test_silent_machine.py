"""A machine that does not answer: it is noticed in the limit, and all connections to it end.

The loss of a machine itself is in `make proof-nodes`. Here a reset connection stands for one whose
probes nobody answers.
"""

from __future__ import annotations

import errno
import json
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from perdure.distribute import lifeline
from perdure.distribute.lifeline import Lifeline, close_connections, is_unanswered, probe

LIMIT_S = 60
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(closing: ExitStack, address: str) -> tuple[socket.socket, socket.socket]:
    """A connection to a listener at the address: this end, and the other one."""
    listener = closing.enter_context(socket.create_server((address, 0)))
    here = closing.enter_context(socket.create_connection(listener.getsockname(), LIMIT_S))
    there, _ = listener.accept()
    return here, closing.enter_context(there)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_connections_to_the_machine_are_closed(closing: ExitStack) -> None:
    lost, _ = pair(closing, "127.0.0.2")
    other, other_end = pair(closing, "127.0.0.1")
    close_connections("::ffff:127.0.0.2")  # as a socket for both versions of IP names it
    assert lost.recv(1) == b""
    other_end.sendall(b"x")
    assert other.recv(1) == b"x"


def test_a_connection_is_probed_in_the_limit(closing: ExitStack) -> None:
    here, _ = pair(closing, "127.0.0.1")
    probe(here, 20)
    assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, interval, count = (here.getsockopt(socket.IPPROTO_TCP, option) for option in tcp)
    assert idle + interval * count == 20
    # While bytes are on their way nothing is probed, and only this ends the connection.
    assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    probe(here, 0.1)  # whole seconds
    probe(here, 1e9)
    assert is_unanswered(OSError(errno.ETIMEDOUT, ""))
    assert not is_unanswered(OSError(errno.ECONNRESET, ""))


@pytest.mark.parametrize("silent", [True, False])
def test_all_close_their_connections_to_a_machine_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, closing: ExitStack, silent: bool
) -> None:
    """Control: after any other loss nothing but the closed connection ends."""
    monkeypatch.setattr(lifeline, "_GRACE_S", 0.0)
    monkeypatch.setattr(lifeline, "is_unanswered", lambda _: silent)
    closed: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(lifeline, "close_connections", closed.put)
    chief = Lifeline(0, "127.0.0.1")
    closing.callback(chief.stop)
    address = chief.address
    other = Lifeline(1, "127.0.0.1", address=address)
    closing.callback(other.stop)
    member = socket.create_connection(("127.0.0.1", address["port"]), LIMIT_S)
    member.sendall(json.dumps({"token": address["token"], "index": 2}).encode() + b"\n")
    member.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    member.close()
    wait_until(lambda: [chief.gone, other.gone] == [[2], [2]])
    late = Lifeline(3, "127.0.0.1", address=address)
    wait_until(lambda: late.gone == [2])
    late.stop()
    # Else the report of the next one could reach a closed socket, whose reset stands for silence.
    wait_until(lambda: [chief.gone, other.gone] == [[2, 3], [2, 3]])
    other.stop()
    chief.stop()
    machines = [closed.get_nowait() for _ in range(closed.qsize())]
    assert machines == ["127.0.0.1"] * 3 * silent
