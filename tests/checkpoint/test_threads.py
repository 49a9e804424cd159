"""A manager with threads, in a forked child, after `close`, and without references to it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, LocalStorage, load_checkpoint
from perdure.checkpoint import saver as saver_module
from perdure.errors import LockedError, StoreError

CALLS: dict[str, Callable[[CheckpointManager], object]] = {
    "save": lambda manager: manager.save(5, state(5)),
    "forced save": lambda manager: manager.save(5, state(5), force=True),
    "restore": lambda manager: manager.restore(),
    "restore_or_initialize": lambda manager: manager.restore_or_initialize(state(0)),
    "pin": lambda manager: manager.pin(1),
    "unpin": lambda manager: manager.unpin(1),
    "delete": lambda manager: manager.delete(1),
    "claim": lambda manager: manager.claim(),
    "save_and_exit": lambda manager: manager.save_and_exit(5, state(5)),
    "exit_preempted": lambda manager: manager.exit_preempted(),
    "reached_preemption": lambda manager: manager.reached_preemption(5),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "with": lambda manager: manager.__enter__(),
}


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(100_000, k, np.float32)}


def saved(directory: Path | str, step: int) -> bool:
    return load_checkpoint(directory, step)["w"].tobytes() == state(step)["w"].tobytes()


def test_two_threads_commit_their_own_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first thread stops between its snapshot and its commit, and the second one saves then. It
    # can enter only without the guard; with the guard, the wait below times out.
    first_has_snapshot, second_has_snapshot = threading.Event(), threading.Event()
    real = saver_module.snapshot  # pyright: ignore[reportPrivateImportUsage]

    def snapshot(value: Any, arena: Any, *rest: Any) -> Any:
        leaves = real(value, arena, *rest)
        if threading.current_thread() is first:
            first_has_snapshot.set()
            second_has_snapshot.wait(0.3)
        else:
            second_has_snapshot.set()
        return leaves

    monkeypatch.setattr(saver_module, "snapshot", snapshot)
    results: dict[int, Any] = {}
    with CheckpointManager(tmp_path) as manager:
        manager.claim()

        def save(step: int) -> None:
            results[step] = manager.save(step, state(step))

        first = threading.Thread(target=save, args=(1,))
        second = threading.Thread(target=save, args=(2,))
        first.start()
        assert first_has_snapshot.wait(60)
        second.start()
        first.join(60)
        second.join(60)
        manager.wait_until_finished()
        assert results == {1: True, 2: True}
        assert second_has_snapshot.is_set()
    assert saved(tmp_path, 1)
    assert saved(tmp_path, 2)


def test_many_threads_take_turns(tmp_path: Path) -> None:
    start, order, steps = threading.Barrier(4), threading.Lock(), iter(range(1, 9))
    problems: list[BaseException] = []
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:

        def work() -> None:
            try:
                start.wait(60)
                for _ in range(2):
                    with order:  # steps only go up
                        step = next(steps)
                        manager.save(step, state(step))
                    manager.is_saving_in_progress()
                    manager.wait_until_finished()
                    assert manager.restore(step).state["w"][0] == step
                    manager.pin(step)
            except BaseException as error:  # noqa: BLE001 (the test looks at it)
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert problems == []
        assert manager.all_steps() == manager.pinned_steps() == list(range(1, 9))
    assert all(saved(tmp_path, step) for step in range(1, 9))


def test_a_call_from_a_signal_handler_in_the_middle_of_a_call_is_refused(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    class Signals:
        """A member of the state that gets a signal while the state is being read."""

        def state_dict(self) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGUSR1)
            return {"value": 1}

        def load_state_dict(self, _: Any) -> None:
            raise AssertionError

    def handler(*_: object) -> None:
        for call in (CALLS["forced save"], CheckpointManager.close):
            with pytest.raises(StoreError, match="in the middle of another call") as error:
                call(manager)
            errors.append(error.value)

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"member": Signals()})
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert len(errors) >= 2
    assert load_checkpoint(tmp_path, 1) == {"member": {"value": 1}}


FORKS = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[2])
from test_threads import CALLS, saved, state
from perdure import CheckpointManager, LocalStorage
from perdure.errors import StoreError

reached, release = threading.Event(), threading.Event()

def before(operation, path):
    if operation == "fsync" and "000000000002-" in path:
        reached.set()
        assert release.wait(60)

def child():
    for name, call in CALLS.items():  # while the parent's save is under way
        try:
            call(manager)
        except StoreError as error:
            assert "forked child" in str(error), (name, error)
        else:
            raise AssertionError(name)
    assert manager.all_steps() == [1]
    assert manager.latest_checkpoint == f"{run}@1"
    assert not manager.is_saving_in_progress()
    assert manager.should_save(7)
    assert saved(run, 1)
    manager.close()

run = sys.argv[1]
with CheckpointManager(LocalStorage(run, before)) as manager:
    manager.save(1, state(1))
    manager.wait_until_finished()
    manager.save(2, state(2))
    assert reached.wait(60)
    if (pid := os.fork()) == 0:
        signal.alarm(30)  # a child that hangs is an error too
        child()
        sys.exit(0)  # with all that Python does at its end
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    release.set()
    manager.wait_until_finished()
    assert manager.save(3, state(3)), "the lock is still the parent's"
assert saved(run, 2) and saved(run, 3)
"""


def test_a_forked_child_may_read_and_is_refused_every_change(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path / "run"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("call", [call for call in CALLS if call != "wait_until_finished"])
def test_a_closed_manager_stays_closed(tmp_path: Path, call: str) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1))
    manager.close()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoreError, match="closed"):
        CALLS[call](manager)
    assert signal.getsignal(signal.SIGTERM) == before
    manager.close()
    assert manager.wait_until_finished(), "nothing is under way"
    assert manager.all_steps() == [1]
    assert manager.latest_step() == 1
    assert manager.metrics(1) == {}
    with CheckpointManager(tmp_path) as other:
        other.save(2, state(2))


def test_a_thread_that_waited_for_close_finds_the_manager_closed(tmp_path: Path) -> None:
    problems: list[BaseException] = []
    manager = CheckpointManager(tmp_path)

    def late() -> None:
        try:
            manager.save(1, state(1))
        except StoreError as error:
            problems.append(error)

    thread = threading.Thread(target=late)
    with manager._turn:
        thread.start()
        manager._closed = True
    thread.join(60)
    assert "closed" in str(problems[0])


def test_a_manager_is_entered_once(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(StoreError, match="one `with`"),
        manager,
    ):
        raise AssertionError


def test_a_notebook_cell_may_be_run_twice(tmp_path: Path) -> None:
    gc.disable()
    previous = signal.getsignal(signal.SIGTERM)
    try:
        for step in (1, 2, 3):  # the same name again, and nothing was closed
            manager = CheckpointManager(tmp_path)
            manager.save(step, state(step))
            assert not manager.reached_preemption(step)
            manager.wait_until_finished()
        del manager
        assert signal.getsignal(signal.SIGTERM) == previous
    finally:
        gc.enable()
        signal.signal(signal.SIGTERM, previous)
    assert saved(tmp_path, 3)


def test_an_abandoned_manager_keeps_the_lock_until_its_save_has_ended(tmp_path: Path) -> None:
    reached, release = threading.Event(), threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "fsync" and "000000000001-" in path:
            reached.set()
            assert release.wait(60)

    manager = CheckpointManager(LocalStorage(tmp_path, before))
    manager.save(1, state(1))
    assert reached.wait(60)
    background = manager._saver.background
    del manager
    with CheckpointManager(tmp_path) as other:
        with pytest.raises(LockedError):
            other.save(2, state(2))
        release.set()
        background.wait()
        del background
        gc.collect()
        assert other.save(2, state(2))
    assert saved(tmp_path, 1)
    assert saved(tmp_path, 2)


def test_an_abandoned_manager_does_not_remove_a_later_handler(tmp_path: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    try:
        first, second = CheckpointManager(tmp_path / "a"), CheckpointManager(tmp_path / "b")
        assert not first.reached_preemption(1)
        assert not second.reached_preemption(1)
        del first
        gc.collect()
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.reached_preemption(2)
        second.close()
    finally:
        signal.signal(signal.SIGTERM, previous)
