"""A process of a group that ended is reported to the others, however it ended."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from group import launch

from perdure.distribute import lifeline
from perdure.distribute.lifeline import Lifeline

LIMIT_S = 60

CHILD = """
import sys
from perdure.distribute.lifeline import Lifeline
Lifeline(2, "127.0.0.1", print, lambda: sys.argv[1].encode(), print)
print("here", flush=True)
sys.stdin.read()
"""


class Board:
    """The key-value store in which process 0 writes its address."""

    def __init__(self) -> None:
        self.address: bytes | None = None

    def publish(self, address: bytes) -> None:
        self.address = address

    def look(self) -> bytes | None:
        return self.address


def made(index: int, board: Board) -> tuple[Lifeline, queue.Queue[int]]:
    gone: queue.Queue[int] = queue.Queue()
    return Lifeline(index, "127.0.0.1", board.publish, board.look, gone.put), gone


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_GRACE_S", 0.0)


def test_a_killed_process_is_reported_to_all() -> None:
    board = Board()
    (chief, chief_gone), (other, other_gone) = made(0, board), made(1, board)
    assert board.address is not None
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, board.address.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert chief_gone.empty()
        child.send_signal(signal.SIGKILL)
        assert chief_gone.get(timeout=LIMIT_S) == 2
        assert other_gone.get(timeout=LIMIT_S) == 2
    finally:
        child.kill()
        child.communicate()
        other.stop()
        chief.stop()


def test_process_0_is_reported_and_late_processes_hear_of_all_losses() -> None:
    board = Board()
    chief, chief_gone = made(0, board)
    first, first_gone = made(1, board)
    second, _ = made(2, board)
    second.stop()
    assert chief_gone.get(timeout=LIMIT_S) == 2
    assert first_gone.get(timeout=LIMIT_S) == 2
    late, late_gone = made(3, board)
    assert late_gone.get(timeout=LIMIT_S) == 2
    chief.stop()
    assert first_gone.get(timeout=LIMIT_S) == 0
    assert late_gone.get(timeout=LIMIT_S) == 0
    first.stop()
    late.stop()


def test_process_0_is_reported_as_soon_as_it_leaves() -> None:
    board = Board()
    chief, _ = made(0, board)
    other, gone = made(1, board)
    other.leaving()  # only process 0 sends messages
    assert gone.empty()
    chief.leaving()
    late, late_gone = made(2, board)
    assert gone.get(timeout=LIMIT_S) == 0
    assert late_gone.get(timeout=LIMIT_S) == 0
    late.stop()
    other.stop()
    chief.stop()


def test_a_process_that_starts_before_process_0_is_reported() -> None:
    board = Board()
    early, _ = made(1, board)  # process 0 does not listen yet
    chief, chief_gone = made(0, board)
    early.stop()
    assert chief_gone.get(timeout=LIMIT_S) == 1
    chief.stop()


def test_a_process_that_has_read_a_message_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others would wait for a process that ends right after its first exchange."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from perdure.distribute.torch import group

    monkeypatch.setattr(lifeline, "_LOOK_S", 1e6)
    wait = timedelta(seconds=LIMIT_S)
    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)

    def client() -> Any:
        return TCPStore("127.0.0.1", server.port, is_master=False, timeout=wait)

    early, chief = group._LossWatch(wait), group._LossWatch(wait)
    early.start(client(), 1, "127.0.0.1")
    chief.start(client(), 0, "127.0.0.1")
    assert early._lifeline is not None
    assert early._lifeline._connection is None
    server.set("message", b"x")
    assert group._Store(client(), early).get("message", 0) == b"x"
    assert early._lifeline._connection is not None
    early.stop()
    chief.stop()


def test_other_connections_are_ignored() -> None:
    board = Board()
    chief, gone = made(0, board)
    member, _ = made(1, board)
    assert board.address is not None
    port = int(board.address.split(b":")[1].split(b",")[0])
    for message in (b"", b'{"token": "x", "index": 5}\n', b"\xff" * 5000, b"[]\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(message)
    member.stop()
    assert gone.get(timeout=LIMIT_S) == 1
    assert gone.empty()
    chief.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_hold_the_connection() -> None:
    board = Board()
    chief, gone = made(0, board)
    member, _ = made(1, board)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # like a worker of a data loader, it outlives its parent
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        member.stop()
        assert gone.get(timeout=LIMIT_S) == 1
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
        chief.stop()


@pytest.mark.parametrize(
    ("origin", "how", "count", "victim"),
    [
        ("made", "kill", 3, 2),
        ("made", "kill", 3, 0),
        ("made", "raise", 2, 0),
        ("joined", "kill", 2, 1),
        ("joined", "raise", 3, 1),
    ],
)
def test_a_wait_for_a_lost_torch_process_ends(
    origin: str, how: str, count: int, victim: int
) -> None:
    """`launch` has a shorter limit than the 600 s of an operation, so a wait would fail the test."""
    options = ("--group", origin, "--how", how, "--victim", f"{victim}")
    ended = launch("lost_worker.py", count, *options, forked="torch")
    texts = []
    for _, answer, err in ended[:victim] + ended[victim + 1 :]:
        assert answer is not None, err
        assert answer["error"] == "WorkerLostError"
        assert "Save nothing" in answer["text"]
        texts.append(answer["text"])
    if victim:
        assert set(texts) == {texts[0]}, "process 0, which waits for it, tells the others"
        assert f"waiting for process {victim} failed" in texts[0]
    else:
        assert all("process 0" in text for text in texts), "its store is gone, too"


@pytest.mark.parametrize(("origin", "how"), [("made", "exit"), ("joined", "raise")])
def test_process_0_leaves_without_keeping_the_others_in_a_collective(origin: str, how: str) -> None:
    """It waits for the others, which may still read its messages; they wait for its tensors."""
    arguments = ("--group", origin, "--how", how, "--victim", "0", "--wait", "collective")
    (status, _, _), (_, answer, err) = launch("lost_worker.py", 2, *arguments, forked="torch")
    assert status == (3 if how == "exit" else 1)
    assert answer is not None, err
    assert answer["error"] == "RuntimeError"


def test_the_keys_of_an_earlier_attempt_of_torchrun_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps its store, where process 0 of the earlier attempt still has an address."""
    from perdure.distribute.torch import group

    class Store(dict[str, bytes]):
        def set(self, key: str, value: bytes) -> None:
            self[key] = value

    store = Store()
    for attempt in ("0", "1"):
        monkeypatch.setattr(group, "_ATTEMPT", attempt)
        watch = group._LossWatch(timedelta(seconds=LIMIT_S))
        watch.start(store, 0, "127.0.0.1")
        watch.stop()
        store.set(group._left(0), b"")
    assert len(store) == 4


def test_a_timeout_names_the_missing_process() -> None:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from perdure.distribute.torch import group
    from perdure.errors import WorkerLostError

    wait = timedelta(milliseconds=50)
    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
    store = group._Store(server, group._LossWatch(wait))
    with pytest.raises(WorkerLostError, match="process 3 did not come"):
        store.get("never", 3)
    assert not store.has("never")
    store.set("now", b"")
    assert store.has("now")
