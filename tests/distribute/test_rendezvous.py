"""The rendezvous: all processes arrive, or those that did get an error that names the others."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from group import free_port

from perdure.distribute import Cluster, ClusterOptions
from perdure.distribute.cluster import Member, await_members, rendezvous
from perdure.errors import ClusterError

# Limits for a rendezvous that never completes, and for one that completes when all have arrived.
BRIEF_S, AMPLE_S = 0.5, 30
HOSTS = ("a:1", "b:1", "c:1")


def play(
    numbers: list[int],
    count: int,
    limit: float = AMPLE_S,
    join: Callable[[Cluster, float], Any] = await_members,
) -> list[Any]:
    """What each process returns or raises; `numbers` are the processes that arrive, as threads."""
    address = f"127.0.0.1:{free_port()}"

    def attend(number: int) -> Any:
        try:
            return join(Cluster(address, count, number, HOSTS[:count], "the test"), limit)
        except ClusterError as error:
            return str(error)

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(attend, numbers))


def test_all_processes_arrive_in_any_order_and_get_the_members() -> None:
    for order in ([0, 1, 2], [2, 1, 0]):
        answers = play(order, 3)
        expected = [Member(n, 3, socket.gethostname(), os.getpid(), "the test") for n in range(3)]
        assert answers == [tuple(expected)] * 3


def test_the_port_is_free_for_the_framework_before_anyone_gets_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that has the answer connects to the framework's service, at the same port. In the
    backlog of the rendezvous it would be reset, which PyTorch reports with a stack of C++."""
    knocks: list[int] = []
    answer = rendezvous._Rendezvous._answer

    def knock(self: Any, text: Any) -> None:
        with socket.socket() as client:
            knocks.append(client.connect_ex(self._cluster.host_port))
        answer(self, text)

    monkeypatch.setattr(rendezvous._Rendezvous, "_answer", knock)
    assert all(len(members) == 2 for members in play([0, 1], 2))
    assert knocks == [errno.ECONNREFUSED]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit passes as soon as a second process has come, and not before.

    On a busy machine the second one might come after any limit that a test can wait for.
    """
    now, decode = [0.0], rendezvous._decode

    def decoded(line: bytes) -> Member | None:
        member = decode(line)
        now[0] += 0 if member is None else 1e6
        return member

    monkeypatch.setattr(rendezvous, "_decode", decoded)
    monkeypatch.setattr(
        rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    )


@pytest.mark.usefixtures("patient")
def test_missing_processes_are_named_in_every_process_that_arrived() -> None:
    answers = play([0, 2], 3, BRIEF_S)
    assert len(set(answers)) == 1
    assert "after 0.5 s 1 of 3 processes had not come: process 1 (b:1). Here are" in answers[0]
    assert f"process 2 ({socket.gethostname()}, pid {os.getpid()})" in answers[0]


def test_a_process_to_which_nobody_came_says_so() -> None:
    (alone,) = play([0], 3, BRIEF_S)
    assert "2 of 3 processes had not come: process 1 (b:1), process 2 (c:1)." in alone
    assert "Nobody came at all: is 127.0.0.1:" in alone


@pytest.mark.parametrize(
    ("host", "resolved", "address"),
    [
        ("127.0.0.2", None, "127.0.0.2"),
        ("localhost", None, "127.0.0.1"),
        ("192.0.2.1", None, ""),  # of no machine: that of a forwarder
        ("no-such-host.invalid", None, ""),
        ("this-machine", "127.0.1.1", ""),  # as Debian writes it into /etc/hosts
        ("this-machine", "127.0.0.3", ""),
    ],
)
def test_process_0_listens_at_the_address_of_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, host: str, resolved: str | None, address: str
) -> None:
    if resolved is not None or host.endswith(".invalid"):

        def look_up(*_: Any, **__: Any) -> list[Any]:
            if resolved is None:
                raise socket.gaierror
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert rendezvous.local_address(host) == address
    monkeypatch.undo()
    with rendezvous.listen(address or "192.0.2.1", 0) as server:
        port = server.getsockname()[1]
        for knock in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as client:
                reached = client.connect_ex((knock, port)) == 0
            assert reached is (address in ("", knock))


def test_a_coordinator_that_does_not_start_is_named() -> None:
    answers = play([1, 2], 3, BRIEF_S)
    for number, answer in enumerate(answers, 1):
        assert answer.startswith(f"process {number} ({socket.gethostname()}, pid")
        assert "waited 0.5 s for process 0 at 127.0.0.1:" in answer
        assert "(from the test), which never answered: [Errno" in answer


@pytest.mark.parametrize("numbers", [[0, 1, 1], [0, 0, 1]])
def test_a_number_claimed_twice_is_an_error_in_all(numbers: list[int]) -> None:
    answers = play(numbers, 3)
    twice = numbers[1]
    assert len(set(answers)) == 1
    assert f"two processes have the number {twice}: pid {os.getpid()} on" in answers[0]
    assert "Every process needs its own number, 0 to 2" in answers[0]


def test_processes_that_disagree_about_their_number_are_refused() -> None:
    address = f"127.0.0.1:{free_port()}"

    def attend(cluster: Cluster) -> str:
        with pytest.raises(ClusterError) as error:
            await_members(cluster, AMPLE_S)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        clusters = [Cluster(address, 3, 0, source="x"), Cluster(address, 2, 1, source="y")]
        answers = list(pool.map(attend, clusters))
    assert answers[0] == answers[1]
    assert "expects 3 (from x), process 1" in answers[0]
    assert "expects 2 (from y)" in answers[0]


def test_other_connections_and_dead_workers_do_not_count() -> None:
    """A scan of ports, a health probe, and a worker that died and was started again."""
    port = free_port()
    cluster = Cluster(f"127.0.0.1:{port}", 3, 0)

    def knock(data: bytes) -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(data)
                    return
            except ConnectionRefusedError:
                continue

    hello = {"hello": "perdure-roll-call-1", "count": 3, "host": "h", "source": "s", "pid": -1}
    lines = [json.dumps({**hello, "index": index}).encode() + b"\n" for index in (1, 7, "x")]
    with ThreadPoolExecutor(2) as pool:
        chief = pool.submit(await_members, cluster, AMPLE_S)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", *lines):
            knock(data)
        second = pool.submit(await_members, Cluster(cluster.coordinator, 3, 1), AMPLE_S)
        members = await_members(Cluster(cluster.coordinator, 3, 2), AMPLE_S)
        assert chief.result() == members == second.result()
    assert [member.pid for member in members] == [os.getpid()] * 3


@pytest.mark.parametrize(("number", "answer"), [(0, b"SSH-2.0\r\n"), (1, b"SSH-2.0\r\n"), (1, b"")])
def test_a_port_where_something_else_listens_is_named(
    number: int, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program, or a group that has started already: one engine's service answers nonsense, the
    other's nothing. A warning comes at once and an error at the end."""
    monkeypatch.setattr(rendezvous, "_SHORT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        port = other.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection:
                    # Read first: closing with bytes unread resets the connection, answer and all.
                    connection.recv(4096)
                    if answer:
                        connection.sendall(answer)
                    else:
                        connection.recv(4096)  # until the other side has waited long enough

        pool.submit(serve)
        try:
            with (
                pytest.warns(
                    UserWarning, match=f"no rendezvous answers at 127.0.0.1:{port}"
                ) as caught,
                pytest.raises(ClusterError) as error,
            ):
                await_members(Cluster(f"127.0.0.1:{port}", 2, number), BRIEF_S)
        finally:
            other.shutdown(socket.SHUT_RDWR)
    assert len(caught) == 1
    assert "again for up to 0.5 s" in str(caught[0].message)
    if not answer:
        assert "which never answered: timed out" in str(error.value)
    elif number == 0:
        assert "the port is taken, and not by a process of this group" in str(error.value)
    else:
        assert "does another process have number 1?" in str(error.value)


def joined_by(engine: str) -> Callable[[Cluster, float], Any]:
    if engine == "jax":
        from perdure.distribute.jax import group
    else:
        from perdure.distribute.torch import group
    return lambda cluster, limit: group.join(cluster, options=ClusterOptions(start_timeout=limit))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_both_engines_begin_with_the_rendezvous(engine: str) -> None:
    answers = play([0, 2], 3, BRIEF_S, joined_by(engine))
    assert len(set(answers)) == 1
    assert "1 of 3 processes had not come: process 1 (b:1)." in answers[0]


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_both_engines_refuse_a_number_that_is_claimed_twice(engine: str) -> None:
    answers = play([0, 1, 1], 3, AMPLE_S, joined_by(engine))
    assert len(set(answers)) == 1
    assert "two processes have the number 1" in answers[0]
