"""`save_interval_steps`: which steps are saved, at whatever steps a loop asks and restarts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from perdure import CheckpointManager, MemoryStorage
from perdure.checkpoint.managed_directory import SaveInterval
from perdure.runtime.heartbeats import listeners


def run(
    storage: Any, asks: list[tuple[int, bool]], interval: int, stop: int | None = None
) -> list[int]:
    """Ask as a loop that resumes from the newest checkpoint does; return the steps that were saved."""
    saved = []
    with CheckpointManager(storage, save_interval_steps=interval, max_to_keep=None) as manager:
        state, start = manager.restore_or_initialize({"step": 0})
        for step, force in asks:
            if step > start and (stop is None or step <= stop):
                state["step"] = step
                due = manager.should_save(step)
                assert due == manager.should_save(step), "a query changes nothing"
                if manager.save(step, state, force=force):
                    saved.append(step)
                    assert due or force
                else:
                    assert not due
        manager.wait_until_finished()
        return saved


def test_a_loop_that_never_hits_a_multiple_saves_once_one_is_passed() -> None:
    asks = [(step, False) for step in range(937, 6000, 937)]
    assert run(MemoryStorage(), asks, 1000) == [1874, 2811, 3748, 4685, 5622]


def test_multiples_of_the_interval_are_saved() -> None:
    with CheckpointManager(MemoryStorage(), save_interval_steps=10) as manager:
        assert [step for step in range(35) if manager.save(step, {"step": step})] == [0, 10, 20, 30]
        assert manager.save(30, {"step": 30}, {"late": 1.0}), "a multiple may be saved twice"
        manager.wait_until_finished()
        assert manager.metrics(30) == {"late": 1.0}


def test_a_forced_save_counts() -> None:
    asks = [(6, False), (12, False), (17, True), (21, True), (24, False), (29, False), (33, False)]
    assert run(MemoryStorage(), asks, 10) == [12, 17, 21, 33]


@pytest.mark.parametrize("seed", range(25))
def test_a_run_that_is_interrupted_anywhere_saves_at_the_same_steps(seed: int) -> None:
    source = random.Random(seed)
    interval = source.choice([1, 2, 7, 10, 100])
    strides = [source.randint(1, 2 * interval) for _ in range(60)]
    asks = [(sum(strides[: n + 1]), source.random() < 0.1) for n in range(60)]
    whole = MemoryStorage()
    expected = run(whole, asks, interval)
    cut = MemoryStorage()
    saved: set[int] = set()
    for stop in sorted(source.sample(range(asks[-1][0]), 4)):
        saved |= set(run(cut, asks, interval, stop))
    saved |= set(run(cut, asks, interval))
    assert sorted(saved) == expected
    with CheckpointManager(cut) as one, CheckpointManager(whole) as other:
        assert one.all_steps() == other.all_steps() == expected


def test_without_a_restore_the_interval_counts_from_the_newest_checkpoint() -> None:
    storage = MemoryStorage()
    with CheckpointManager(storage, save_interval_steps=1000) as manager:
        assert manager.save(1874, {"step": 1874})
    with CheckpointManager(storage, save_interval_steps=1000) as manager:
        assert not manager.should_save(1900)
        assert manager.should_save(2001)


def test_should_save_sends_no_heartbeat() -> None:
    heard: list[tuple[str, int | None]] = []

    def listener(phase: str, step: int | None) -> None:
        heard.append((phase, step))

    with CheckpointManager(MemoryStorage(), save_interval_steps=10) as manager:
        listeners.append(listener)
        try:
            assert manager.should_save(10)
            assert not manager.should_save(9)
            assert heard == []
            manager.save(3, {"step": 3})
            assert heard == [("step", 3)]
        finally:
            listeners.remove(listener)


def test_should_save_does_not_overwrite_the_save_of_another_thread() -> None:
    class Listing:
        """A run in which another thread saves step 25 while its checkpoints are listed."""

        def newest_step(self) -> int:
            interval.record(25)
            return 7

    listing: Any = Listing()
    interval = SaveInterval(10, listing)
    assert interval.is_due(12)
    assert not interval.is_due(26)
    assert interval.is_due(31)
