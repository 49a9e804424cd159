"""A process of a group that ended is reported to the others, however it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from group import launch

from perdure.distribute import lifeline
from perdure.distribute.key_value_group import KeyValueProcesses
from perdure.distribute.lifeline import Lifeline

LIMIT_S = 60

CHILD = """
import json
import sys
from perdure.distribute.lifeline import Lifeline
Lifeline(2, "127.0.0.1", address=json.loads(sys.argv[1]))
print("here", flush=True)
sys.stdin.read()
"""


class Gone:
    """The processes that a lifeline finds gone, one after the other."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._read = 0

    def empty(self) -> bool:
        return len(self._lifeline.gone) == self._read

    def get(self) -> int:
        deadline = time.monotonic() + LIMIT_S
        while self.empty():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self._read += 1
        return self._lifeline.gone[self._read - 1]


def made(index: int, chief: Lifeline | None = None) -> tuple[Lifeline, Gone]:
    lifeline = Lifeline(index, "127.0.0.1", address=chief and chief.address)
    return lifeline, Gone(lifeline)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_GRACE_S", 0.0)


def test_a_killed_process_is_reported_to_all() -> None:
    chief, chief_gone = made(0)
    other, other_gone = made(1, chief)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(chief.address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert chief_gone.empty()
        child.send_signal(signal.SIGKILL)
        assert chief_gone.get() == 2
        assert other_gone.get() == 2
    finally:
        child.kill()
        child.communicate()
        other.stop()
        chief.stop()


def test_process_0_is_reported_and_late_processes_hear_of_all_losses() -> None:
    chief, chief_gone = made(0)
    first, first_gone = made(1, chief)
    second, _ = made(2, chief)
    second.stop()
    assert chief_gone.get() == 2
    assert first_gone.get() == 2
    late, late_gone = made(3, chief)
    assert late_gone.get() == 2
    chief.stop()
    assert first_gone.get() == 0
    assert late_gone.get() == 0
    first.stop()
    late.stop()


def test_process_0_is_reported_as_soon_as_it_leaves() -> None:
    chief, _ = made(0)
    other, gone = made(1, chief)
    other.leaving()  # only process 0 sends messages
    assert gone.empty()
    chief.leaving()
    late, late_gone = made(2, chief)
    assert gone.get() == 0
    assert late_gone.get() == 0
    late.stop()
    other.stop()
    chief.stop()


def test_other_connections_are_ignored() -> None:
    chief, gone = made(0)
    member, _ = made(1, chief)
    port = chief.address["port"]
    for message in (b"", b'{"token": "x", "index": 5}\n', b"\xff" * 5000, b"[]\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(message)
    member.stop()
    assert gone.get() == 1
    assert gone.empty()
    chief.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_hold_the_connection() -> None:
    chief, gone = made(0)
    member, _ = made(1, chief)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # like a worker of a data loader, it outlives its parent
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        member.stop()
        assert gone.get() == 1
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


def served(seconds: float = LIMIT_S) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    wait = timedelta(seconds=seconds)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)


def test_the_keys_of_an_earlier_attempt_of_torchrun_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps its store, where the processes of the earlier attempt have left."""
    from perdure.distribute.cluster import Cluster, ClusterOptions
    from perdure.distribute.torch import group

    store = served()
    before = store.num_keys()
    for attempt in ("0", "1"):
        monkeypatch.setattr(group, "_ATTEMPT", attempt)
        cluster = Cluster("127.0.0.1:1", 1, 0)
        group._Membership(store, "127.0.0.1", cluster, ClusterOptions(), None).leave()
    assert store.num_keys() - before == 2


def test_a_timeout_names_the_missing_process() -> None:
    from perdure.distribute.torch import group
    from perdure.errors import WorkerLostError

    store = served()
    members = KeyValueProcesses(
        lambda: group._Store("127.0.0.1", store.port, LIMIT_S), 0, 4, limit=0.05
    )
    with pytest.raises(WorkerLostError, match="process 1 did not come"):
        members.barrier()


def test_a_process_that_is_gone_ends_a_wait_and_not_a_message() -> None:
    """What a process wrote before its end is still read."""
    from perdure.distribute.torch import group
    from perdure.errors import WorkerLostError

    store = served()
    chief, _ = made(0)
    other, _ = made(1, chief)
    chief.end_wait = group._Store("127.0.0.1", store.port, LIMIT_S).end_wait
    members = [
        KeyValueProcesses(
            lambda: group._Store("127.0.0.1", store.port, LIMIT_S), index, 2, lifeline=chief
        )
        for index in range(2)
    ]
    members[1].collect(b"last words")
    threading.Timer(0.2, other.stop).start()
    assert members[0].collect(b"") == [b"", b"last words"]
    for _ in range(2):  # while it waits, and when it is known
        with pytest.raises(WorkerLostError, match="waiting for process 1 failed"):
            members[0].collect(b"")
    chief.stop()
