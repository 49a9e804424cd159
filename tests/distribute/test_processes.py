"""Agreement through a key-value store: every process gets the same answer; old keys are deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax._src.distributed
import numpy as np
import pytest

from perdure import CheckpointManager
from perdure.distribute import key_value_group
from perdure.distribute.jax import group as jax_group
from perdure.distribute.key_value_group import KeyValueProcesses, KeyValueStore, late
from perdure.distribute.torch import group as torch_group
from perdure.errors import ClusterError, WorkerLostError
from perdure.runtime.process_group import SingleProcess


class Shelf:
    """A key-value store for threads that stand for processes."""

    error: type[Exception] = RuntimeError
    timeout = "timeout"

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.content, f"{key} is set twice"
            self.content[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.content, timeout=min(seconds, 30)):
                raise RuntimeError("timeout")
            return self.content[key]

    def delete(self, key: str) -> None:
        with self._changed:
            del self.content[key]

    def answers(self, text: str) -> bool:
        return True


def writer_of(key: str) -> int:
    """The process that sets the key `perdure/CHANNEL/ROUND/WRITER`."""
    return int(key.split("/")[3])


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

    def get(shelf: Shelf, key: str, seconds: float) -> bytes:
        reads.append(writer_of(key))
        return real(shelf, key, seconds)

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


class Counting(Shelf):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self._guard = threading.Lock()

    def count(self) -> None:
        with self._guard:
            self.requests += 1

    def set(self, key: str, value: bytes) -> None:
        self.count()
        super().set(key, value)

    def get(self, key: str, seconds: float) -> bytes:
        self.count()
        return super().get(key, seconds)

    def delete(self, key: str) -> None:
        self.count()
        super().delete(key)


def requests_of(path: Path, count: int) -> dict[str, float]:
    """How many requests each call of a manager costs, for each of `count` processes."""
    shelf, meeting = Counting(), threading.Barrier(count)
    found: dict[str, float] = {}

    def work(index: int) -> None:
        group = KeyValueProcesses(lambda: shelf, index, count)
        state = {"weights": np.zeros(64), "step": 0}

        def measure(name: str, call: Callable[[], object]) -> None:
            meeting.wait(30)
            before = shelf.requests
            meeting.wait(30)
            call()
            meeting.wait(30)
            found[name] = (shelf.requests - before) / count

        def save(step: int) -> None:
            manager.save(step, state)
            manager.wait_until_finished()

        with CheckpointManager(path, processes=group, recipe={}) as manager:
            measure("begin", lambda: manager.restore_or_initialize(state))
            measure("first save", lambda: save(1))
            measure("save", lambda: save(2))
            measure("restore", lambda: manager.restore(2, state))
            measure("vote", lambda: manager.reached_preemption(2))
            measure("change", lambda: manager.pin(1))

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    return found


def test_requests_of_each_process_do_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    few, many = (requests_of(tmp_path / f"{count}", count) for count in (2, 8))
    assert few.keys() == many.keys()
    for call, requests in many.items():
        assert 0 < requests <= few[call] + 1, call
    assert few["save"] <= 8


class Limited(Shelf):
    """A store in which waits for one process end at once, those for its key by process 0 included.

    With `impatient`, process 1 waits in vain for process 0 once, after that has come or, with `never`,
    before it does.
    """

    def __init__(self, absent: int = -1, impatient: bool = False, never: bool = False) -> None:
        super().__init__()
        self.absent, self.impatient, self.never = absent, impatient, never
        self.came = threading.Event()
        self.waited = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if key.endswith("/1/0"):
            self.came.set()

    def get(self, key: str, seconds: float) -> bytes:
        process = writer_of(key)
        if process == self.absent:
            assert not self.impatient or self.waited.wait(30)
            raise RuntimeError("timeout")
        if process == 0 and (self.impatient or self.never):
            assert self.never or self.came.wait(30)
            self.impatient = False
            self.waited.set()
            raise RuntimeError("timeout")
        return super().get(key, seconds)


def lost_in(shelf: Limited, members: Sequence[int], work: Callable[[Any], Any]) -> list[str]:
    """What processes of a group of four raise."""

    def run(index: int) -> str:
        group = KeyValueProcesses(lambda: shelf, index, 4, limit=7)
        with pytest.raises(WorkerLostError) as error:
            work(group)
        with pytest.raises(WorkerLostError):
            work(group)
        return str(error.value)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


@pytest.mark.parametrize("impatient", [False, True], ids=["in time", "long before process 0"])
def test_all_processes_name_the_one_that_is_missing(impatient: bool) -> None:
    """Process 0 tells them, also one whose own time was over while process 0 still waited."""
    operations: list[Callable[[KeyValueProcesses], Any]] = [
        lambda group: group.barrier(),
        lambda group: group.gather(b"x"),
        lambda group: group.any(True),
        lambda group: (group.collect(b"x"), group.broadcast(b"y" if group.is_chief else None)),
    ]
    for work in operations:
        texts = lost_in(Limited(3, impatient), (0, 1, 2), work)
        assert texts == [str(late(3, 7))] * 3


def test_a_process_0_that_does_not_come_is_named() -> None:
    texts = lost_in(Limited(never=True), (1, 2), lambda group: group.barrier())
    assert texts == [str(late(0, 7))] * 2


class Dawdling(Shelf):
    """Each process comes 5 s after the one before it, on a clock of its own."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def get(self, key: str, seconds: float) -> bytes:
        self.waits.append(seconds)
        self.now += min(5, seconds)
        if seconds < 5:
            raise RuntimeError("timeout")
        return b"\0here"


def test_the_waits_of_one_operation_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Dawdling()
    monkeypatch.setattr(key_value_group, "monotonic", lambda: shelf.now)
    with pytest.raises(WorkerLostError, match="process 2 did not come"):
        KeyValueProcesses(lambda: shelf, 0, 4, limit=7).collect(b"")
    assert shelf.waits == [7, 2]


def test_what_is_there_is_read_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Dawdling()
    monkeypatch.setattr(key_value_group, "monotonic", lambda: shelf.now)
    with pytest.raises(WorkerLostError, match="process 3 did not come"):
        KeyValueProcesses(lambda: shelf, 0, 4, limit=10).collect(b"")
    assert shelf.waits == [10, 5, 1], "long enough to find a key"


def test_the_clients_wait_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Client:
        def set_timeout(self, limit: timedelta) -> None:
            waits.append(limit.total_seconds())

        def get(self, key: str) -> bytes:
            return b"x"

        def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
            waits.append(milliseconds / 1000)
            return b"x"

    for store in clients(monkeypatch, Client()):
        assert store.get("key", 5) == b"x"
    assert waits == [5, 5]


def clients(monkeypatch: pytest.MonkeyPatch, client: Any) -> list[KeyValueStore]:
    """The clients of PyTorch and of JAX, over another one."""
    monkeypatch.setattr(torch_group, "TCPStore", lambda *_, **__: client)
    monkeypatch.setattr(jax._src.distributed.global_state, "client", client)
    return [torch_group._Store("127.0.0.1", 1, 20), jax_group._CoordinationService()]


@pytest.mark.parametrize(
    ("engine", "reason", "gone"),
    [
        ("torch", "Broken pipe", "process 0 (or the launcher"),
        ("jax", "UNAVAILABLE: Socket closed", "process 0 (or the launcher"),
        ("jax", "UNAVAILABLE: The following tasks are unhealthy", "a process of the group is gone"),
        ("jax", "ABORTED: Task 1", "a process of the group is gone"),
    ],
)
def test_a_store_that_does_not_answer_means_that_process_0_is_gone(
    monkeypatch: pytest.MonkeyPatch, engine: str, reason: str, gone: str
) -> None:
    class Client:
        def fail(self, *_: Any) -> Any:
            raise RuntimeError(reason) if engine == "torch" else jax.errors.JaxRuntimeError(reason)

        set_timeout = set = get = check = delete_key = fail
        key_value_set_bytes = blocking_key_value_get_bytes = key_value_delete = fail

    store = clients(monkeypatch, Client())[engine == "jax"]
    group = KeyValueProcesses(lambda: store, 0, 2)
    calls: list[Callable[[], Any]] = [
        lambda: group._set("key", b""),
        lambda: group._get("key", 1),
        lambda: group._delete(["key"]),
    ]
    for call in calls:
        with pytest.raises(WorkerLostError) as caught:
            call()
        assert gone in str(caught.value)
        assert reason in str(caught.value)


def test_an_error_of_process_0_in_an_operation_ends_it_for_all() -> None:
    """Its next operation would otherwise be taken for the answer of this one."""

    def decide(sent: list[bytes]) -> bytes:
        raise KeyboardInterrupt

    def work(group: KeyValueProcesses) -> list[str]:
        kinds = []
        for _ in range(2):
            try:
                group.agree(b"", decide)
            except BaseException as error:  # noqa: BLE001
                kinds.append(type(error).__name__)
        return kinds

    (chief, other), _ = together(2, work)
    assert chief == ["KeyboardInterrupt", "WorkerLostError"]
    assert other == ["WorkerLostError", "WorkerLostError"]


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


def test_workers_of_a_supervisor_without_their_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would train alone, and the second find the run locked, or finished."""
    monkeypatch.setenv("PERDURE_ATTEMPT", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterError, match="has started 2 workers, and the manager was not given"):
        CheckpointManager(tmp_path / "run")
    CheckpointManager(tmp_path / "run", processes=SingleProcess()).close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    CheckpointManager(tmp_path / "run").close()
