"""The manager: when it saves, what it keeps, what it restores, and when it raises errors."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import flip
from perdure import (
    Checkpoint,
    CheckpointManager,
    LocalStorage,
    MemoryStorage,
    load_checkpoint,
    verify_run,
)
from perdure.checkpoint.saver import Background
from perdure.errors import (
    CorruptionError,
    LockedError,
    MismatchError,
    NoGoodCheckpointError,
    SaveError,
    StepNotFoundError,
)
from perdure.store import Run
from perdure.store.entry_builder import EntryBuilder
from perdure.store.gc_pause import gc_paused
from pretend import Pretend, play


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(1000, k, np.float32), "step": k}


def train(directory: Any, stop: int, **options: Any) -> list[int]:
    with CheckpointManager(directory, **options) as manager:
        current, start = manager.restore_or_initialize(lambda: state(0))
        for step in range(start, stop):
            current = state(current["step"] + 1)
            manager.save(step + 1, current)
        manager.wait_until_finished()
        return manager.all_steps()


def test_a_loop_saves_at_its_interval_and_keeps_the_newest(tmp_path: Path) -> None:
    assert train(tmp_path, 23, save_interval_steps=5, max_to_keep=3) == [10, 15, 20]
    assert train(tmp_path, 31, save_interval_steps=5, max_to_keep=3) == [20, 25, 30]
    assert verify_run(Run(tmp_path)).problems == ()


def test_a_first_run_starts_from_the_fresh_state(tmp_path: Path) -> None:
    fresh = state(0)
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() is None
        restored, step = manager.restore_or_initialize(fresh)
        assert restored is fresh
        assert step == 0
        with pytest.raises(StepNotFoundError, match="expected a checkpoint, found none"):
            manager.restore()


def test_save_says_whether_it_saves_and_force_overrides(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=10) as manager:
        assert not manager.save(7, state(7))
        assert manager.save(8, state(8), force=True)
        assert manager.save(10, state(10))
        manager.wait_until_finished()
        assert manager.all_steps() == [8, 10]
        assert manager.latest_step() == 10


def test_an_array_that_changes_after_save_is_saved_as_it_was(tmp_path: Path) -> None:
    live = state(1)
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 6):
            live["w"][:] = step
            live["step"] = step
            manager.save(step, live)
            live["w"][:] = -1
        manager.wait_until_finished()
        for step in range(1, 6):
            assert manager.restore(step).state["w"].tobytes() == state(step)["w"].tobytes()


def test_restoring_without_a_template_gives_plain_values(tmp_path: Path) -> None:
    train(tmp_path, 3)
    with CheckpointManager(tmp_path) as manager:
        restored, step = manager.restore(2)
        assert step == restored["step"] == 2
    assert load_checkpoint(tmp_path, leaves="step") == {"step": 3}
    assert load_checkpoint(tmp_path, 1)["w"].tobytes() == state(1)["w"].tobytes()


def test_a_damaged_checkpoint_is_skipped_named_and_quarantined_by_the_first_save(
    tmp_path: Path,
) -> None:
    train(tmp_path, 3)
    flip(sorted((tmp_path / "packs").iterdir())[-1])
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CorruptionError, match=r"step 3, leaf 'w'.*expected hash .*found"):
            manager.restore(3)
        with pytest.warns(UserWarning, match=r"step 3 is damaged and was skipped; step 2"):
            restored, step = manager.restore(like=state(0))
        assert step == restored["step"] == 2
        assert not (tmp_path / "quarantine").exists(), "a process that only reads changes nothing"
        manager.save(3, state(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
    names = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert names == ["000000000003-0.json"]
    (pack,) = Run(tmp_path).log.view.damaged
    assert pack.startswith("000000000003-00000-"), "the log tells of the damaged pack"


def test_a_run_with_only_damaged_checkpoints_raises(tmp_path: Path) -> None:
    train(tmp_path, 2)
    for pack in (tmp_path / "packs").iterdir():
        flip(pack)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(NoGoodCheckpointError, match="found 2 damaged"),
    ):
        manager.restore_or_initialize(lambda: state(0))


def test_a_reader_warns_and_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path, 2)
    flip(sorted((tmp_path / "packs").iterdir())[-1])
    held = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match="step 2 is damaged"):
        assert load_checkpoint(tmp_path)["step"] == 1
    with pytest.warns(UserWarning, match="step 2 is damaged"):
        assert Checkpoint(**state(0)).restore(tmp_path) == 1
    assert sorted(tmp_path.rglob("*")) == held


def test_a_template_that_does_not_fit_is_refused_with_every_difference(tmp_path: Path) -> None:
    train(tmp_path, 1)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(MismatchError, match="differ in 2 leaves"),
    ):
        manager.restore(like={"w": np.zeros(3, np.float32), "step": 0, "new": 1})


def failing(code: int, when: Any) -> Any:
    def before(operation: str, path: str) -> None:
        if operation == "fsync" and when["fail"]:
            when["fired"] += 1
            raise OSError(code, os.strerror(code), path)

    return before


def test_a_failed_background_save_is_raised_by_the_next_call_and_costs_no_checkpoint(
    tmp_path: Path,
) -> None:
    when = {"fail": False, "fired": 0}
    storage = LocalStorage(tmp_path, failing(errno.ENOSPC, when))
    with CheckpointManager(storage) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        when["fail"] = True
        manager.save(2, state(2))
        with pytest.raises(
            SaveError, match=r"saving step 2 failed.*last good checkpoint is step 1"
        ):
            manager.wait_until_finished()
        manager.save(3, state(3))
        with pytest.raises(SaveError, match="saving step 3 failed"):
            manager.save(4, state(4))
        assert when["fired"] >= 2
        when["fail"] = False
        manager.save(5, state(5))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 5]
    assert verify_run(Run(tmp_path)).ok


def test_an_error_of_the_last_save_surfaces_at_close(tmp_path: Path) -> None:
    when = {"fail": False, "fired": 0}
    manager = CheckpointManager(LocalStorage(tmp_path, failing(errno.EIO, when)))
    manager.save(1, state(1))
    manager.wait_until_finished()
    when["fail"] = True
    manager.save(2, state(2))
    with pytest.raises(SaveError, match="saving step 2 failed"):
        manager.close()
    manager.close()


def test_saves_run_in_the_background(tmp_path: Path) -> None:
    reached, release = threading.Event(), threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "fsync" and "000000000002-" in path:
            reached.set()
            assert release.wait(60)

    with CheckpointManager(LocalStorage(tmp_path, before)) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        manager.save(2, state(2))
        assert reached.wait(60)
        assert manager.is_saving_in_progress()
        assert manager.all_steps() == [1]
        release.set()
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        assert manager.all_steps() == [1, 2]


def test_a_second_manager_raises_at_its_first_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first, CheckpointManager(tmp_path) as second:
        first.save(1, state(1))
        with pytest.raises(LockedError, match="this process already has a manager"):
            second.save(2, state(2))
        first.wait_until_finished()
        assert first.all_steps() == [1]


@pytest.mark.parametrize("options", [{"max_to_keep": 0}, {"save_interval_steps": 0}])
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected .* found 0"):
        CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]


def test_sigterm_saves_at_the_next_step_and_exits_with_75(tmp_path: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, save_interval_steps=100) as manager:
        assert not manager.reached_preemption(1)
        signal.raise_signal(signal.SIGTERM)
        assert manager.reached_preemption(2)
        with pytest.raises(SystemExit) as left:
            manager.save_and_exit(2, state(2))
        assert left.value.code == 75
    # Until the process is gone, another SIGTERM must not turn status 75 into something else.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, previous)
    assert load_checkpoint(tmp_path)["step"] == 2


def test_sigterm_is_not_taken_over_before_the_loop_asks(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_groups_members_and_restores_into_them(tmp_path: Path) -> None:
    first = Checkpoint(weights=np.arange(3.0), epoch=4)
    assert first.save(tmp_path, 10) == f"{tmp_path}@10"
    second = Checkpoint(weights=np.zeros(3), epoch=0)
    assert second.restore(tmp_path) == 10
    assert second.epoch == 4
    assert second.weights.tolist() == [0, 1, 2]
    with CheckpointManager(tmp_path) as manager:
        third, step = manager.restore_or_initialize(Checkpoint(weights=np.zeros(3), epoch=0))
        assert (third.epoch, step) == (4, 10)
    with pytest.raises(AttributeError, match="cannot be called 'save'"):
        Checkpoint(save=1)


def test_deleting_a_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, 3)
    with CheckpointManager(tmp_path) as manager:
        manager.delete(2)
        assert manager.all_steps() == [1, 3]
        with pytest.raises(
            StepNotFoundError, match="expected a checkpoint of step 2, found steps 1, 3"
        ):
            manager.delete(2)


def test_a_manager_works_on_any_storage() -> None:
    storage = MemoryStorage()
    assert train(storage, 4) == [1, 2, 3, 4]
    assert load_checkpoint(storage)["step"] == 4


def test_in_a_group_all_restore_what_the_chief_picks_and_agree_to_exit(tmp_path: Path) -> None:
    train(tmp_path, 3)
    flip(sorted((tmp_path / "packs").iterdir())[-1])

    def member(processes: Pretend) -> tuple[int, int, bool, list[int]]:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            restored, step = manager.restore_or_initialize(lambda: state(0))
            # Threads cannot take over signals; the second process plays one that got SIGTERM.
            if processes.index == 1:
                manager.preemption.notify()
            asked = manager.reached_preemption(step)
            manager.save(step + 1, state(step + 1))
            manager.wait_until_finished()
            processes.barrier()
            return restored["step"], step, asked, manager.all_steps()

    with pytest.warns(UserWarning, match="step 3 is damaged"):
        results = play(2, member)
    assert results == [(2, 2, True, [1, 2, 3])] * 2


def test_a_manager_that_is_never_closed_ends_quietly(tmp_path: Path) -> None:
    program = """
import sys
import jax.numpy as jnp
from perdure import CheckpointManager
manager = CheckpointManager(sys.argv[1])
manager.save(1, {"w": jnp.ones(3)})
manager.wait_until_finished()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_checkpoint(tmp_path / "run", 1)["w"].tolist() == [1, 1, 1]
    assert verify_run(Run(tmp_path / "run")).ok


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collection_is_back_on_after_a_save_of_many_leaves(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = EntryBuilder.uncut
    monkeypatch.setattr(
        EntryBuilder, "uncut", lambda *given: [seen.append(gc.isenabled()), real(*given)][1]
    )
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        with CheckpointManager(MemoryStorage()) as manager:
            for step, count in ((1, 3), (2, 1000)):
                manager.save(step, {f"leaf{i}": np.array([i, step]) for i in range(count)})
                manager.wait_until_finished()
        assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()
    # Few leaves and many; each time for the state and for the leaves of the process.
    assert seen == [before, before, False, False]


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collection_is_as_it_was_in_a_child_that_is_forked_during_a_pause(
    before: bool,
) -> None:
    """Of two threads that pause, one forks, and the other would never end its pause there."""
    reached, release = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            reached.set()
            release.wait()

    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    other = threading.Thread(target=pause)
    try:
        other.start()
        reached.wait()
        with gc_paused():
            if (child := os.fork()) == 0:
                os._exit(gc.isenabled())
            in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        during = gc.isenabled()  # the other pause has not ended
        release.set()
        other.join()
        after = gc.isenabled()
    finally:
        release.set()
        (gc.enable if was else gc.disable)()
    assert (in_child, during, after) == (before, False, before)


def test_an_interrupted_wait_does_not_lose_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    background, go = Background(), threading.Event()

    def job() -> None:
        go.wait()

    background.submit(job)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(background._job, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    assert background.busy, "the snapshot is still being read"
    monkeypatch.undo()
    go.set()
    background.wait()
    assert not background.busy


def test_a_job_that_has_ended_is_not_kept() -> None:
    """Its saver, which nobody else may have, would keep the lock of the run for a moment longer."""
    background, may_end, kept = Background(), threading.Event(), []

    class Job:
        def __call__(self) -> None:
            assert may_end.wait(60)

    job = Job()
    reference = weakref.ref(job)
    background.submit(job)
    del job
    # Called by the thread itself as soon as the result is known.
    future: Any = background._job
    future.add_done_callback(lambda _: kept.append(reference()))
    may_end.set()
    background.wait()
    assert kept == [None]


LEAVES = """
import sys
import numpy as np
import perdure
from perdure.store import LocalStorage

class Full(LocalStorage):
    def create(self, name, size):
        raise OSError(28, "no room here")

where = LocalStorage(sys.argv[1]) if sys.argv[2] == "good" else Full(sys.argv[1])
manager = perdure.CheckpointManager(where)
manager.save(1, {"a": np.arange(3_000_000.0)}, force=True)
"""


def test_a_program_that_ends_without_close_waits_for_its_save(tmp_path: Path) -> None:
    # Large enough for the thread pools, which accept no more work at that point.
    command = [sys.executable, "-c", LEAVES]
    subprocess.run([*command, str(tmp_path / "good"), "good"], check=True)
    assert load_checkpoint(tmp_path / "good", 1)["a"].tobytes() == np.arange(3_000_000.0).tobytes()
    full = [*command, str(tmp_path / "full"), "full"]
    stderr = subprocess.run(full, check=True, capture_output=True, text=True).stderr
    assert "The last save before the end failed" in stderr
    assert "no room here" in stderr
