"""Agreement through a key-value store: every process gets the same answer; old keys are deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from perdure.distribute.key_value_group import KeyValueProcesses
from perdure.process_group import SingleProcess


class Shelf:
    """A key-value store for threads that stand for processes."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.content, f"{key} is set twice"
            self.content[key] = value
            self._changed.notify_all()

    def get(self, key: str, process: int) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.content, timeout=30), key
            return self.content[key]

    def delete(self, key: str) -> None:
        with self._changed:
            del self.content[key]


def together(count: int, work: Callable[[KeyValueProcesses], Any]) -> tuple[list[Any], Shelf]:
    shelf = Shelf()
    with ThreadPoolExecutor(count) as pool:
        members = [KeyValueProcesses(lambda: shelf, index, count) for index in range(count)]
        return list(pool.map(work, members)), shelf


def test_every_process_gets_the_same_answers() -> None:
    big = bytes(range(256)) * 10_000

    def work(group: KeyValueProcesses) -> Any:
        group.barrier()
        return (
            group.gather(b"p%d" % group.index),
            group.broadcast(big if group.is_chief else None),
            group.any(False),
            group.any(group.index == 2),
            group.gather(big)[1] == big,
            group.broadcast(b"" if group.is_chief else None),
        )

    answers, _ = together(3, work)
    assert answers == [([b"p0", b"p1", b"p2"], big, False, True, True, b"")] * 3


def test_process_0_collects_with_one_message_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []
    real = Shelf.get

    def get(shelf: Shelf, key: str, process: int) -> bytes:
        reads.append(process)
        return real(shelf, key, process)

    monkeypatch.setattr(Shelf, "get", get)

    def work(group: KeyValueProcesses) -> Any:
        found = []
        for number in range(3):
            found.append(group.collect(b"%d of %d" % (number, group.index)))
            group.broadcast(b"next" if group.is_chief else None)
        return found

    answers, shelf = together(4, work)
    assert answers[0] == [[b"%d of %d" % (n, index) for index in range(4)] for n in range(3)]
    assert answers[1:] == [[[]] * 3] * 3
    assert reads.count(0) == 9, "each of three processes reads the orders of process 0"
    assert len(reads) == 9 + 9, "and process 0 one answer of each"
    assert len(shelf.content) <= 1, "only the last order is left"


def test_channels_do_not_wait_for_each_other() -> None:
    def work(group: KeyValueProcesses) -> Any:
        # In another order in each process: on one channel this would be a deadlock or a mix-up.
        order = ["save", "main"] if group.index else ["main", "save"]
        with ThreadPoolExecutor(2) as pool:
            answers = {
                name: pool.submit(group.channel(name).gather, f"{name}{group.index}".encode())
                for name in order
            }
            return {name: answer.result() for name, answer in answers.items()}

    answers, _ = together(2, work)
    assert answers == [{"save": [b"save0", b"save1"], "main": [b"main0", b"main1"]}] * 2


def test_old_keys_are_deleted() -> None:
    def work(group: KeyValueProcesses) -> None:
        for _ in range(50):
            group.barrier()
            group.broadcast(b"x" if group.is_chief else None)
        group.barrier()

    _, shelf = together(3, work)
    assert len(shelf.content) <= 3


def test_a_group_of_one_process() -> None:
    alone = SingleProcess()
    alone.barrier()
    assert (alone.index, alone.count, alone.is_chief) == (0, 1, True)
    assert alone.broadcast(b"x") == b"x"
    assert alone.gather(b"x") == [b"x"]
    assert [alone.any(False), alone.channel("save").any(True)] == [False, True]
    with pytest.raises(TypeError):
        alone.broadcast(None)
