"""One history, as the manager enforces it: refusals in the call itself, rollback, exits, groups."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import flip
from perdure import (
    CheckpointManager,
    ManagerOptions,
    MemoryStorage,
    Retention,
    load_checkpoint,
    verify_run,
)
from perdure.errors import (
    CorruptionError,
    HistoryError,
    LockedError,
    StepExistsError,
    StepNotFoundError,
)
from perdure.store import Run
from pretend import Pretend, play


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(1000, k, np.float32), "step": k}


def filled(where: Any, *steps: int, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(where, **options)
    for step in steps:
        manager.save(step, state(step))
    manager.wait_until_finished()
    return manager


def test_a_step_that_is_not_new_is_refused_in_the_call_itself() -> None:
    storage = MemoryStorage()
    with filled(storage, 10, 20, 30) as manager:
        with pytest.raises(
            HistoryError, match=r"newest checkpoint is step 30.*manager\.rollback\(20\)"
        ):
            manager.save(25, state(25))
        with pytest.raises(StepExistsError, match="step 30 is committed with fingerprint"):
            manager.save(30, state(7))
        assert manager.save(30, state(30))
        assert manager.save(20, state(20))
        assert manager.save(31, state(31))
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 20, 30, 31]


def test_a_repeated_save_does_not_open_the_way_for_older_steps() -> None:
    with filled(MemoryStorage(), 10, 20, 30, 40) as manager:
        assert manager.save(20, state(20)), "equal bits"
        with pytest.raises(HistoryError, match="step 40"):
            manager.save(25, state(25))
        assert manager.save(50, state(50))
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 20, 30, 40, 50]


def test_no_save_is_lost_after_a_restore_of_an_older_step(tmp_path: Path) -> None:
    """With steps 200 to 1000, restore(100) and save_and_exit(150) once pruned 150 and exited."""
    filled(tmp_path, *range(100, 1001, 100), max_to_keep=10).close()
    with CheckpointManager(tmp_path, max_to_keep=3) as manager:
        manager.restore(100)
        with pytest.raises(HistoryError, match="step 150 cannot be saved"):
            manager.save_and_exit(150, state(150))
        assert manager.rollback(100) == list(range(200, 1001, 100))
        with pytest.raises(SystemExit) as status:
            manager.save_and_exit(150, state(150))
    assert status.value.code == 75
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore().step == 150
        assert manager.all_steps() == [100, 150]


def test_a_restart_after_a_rollback_resumes_from_the_new_line(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30).close()
    with CheckpointManager(tmp_path) as manager:
        manager.restore(20)
        with pytest.raises(HistoryError):
            manager.save(25, state(25))
        manager.rollback(20)
        manager.save(25, state(-25))
        manager.save(27, state(-27))
    with CheckpointManager(tmp_path) as manager:
        restored, step = manager.restore()
        assert (step, restored["step"]) == (27, -27)
    assert verify_run(Run(tmp_path)).ok


def test_a_damaged_newest_checkpoint_that_a_restore_set_aside_does_not_count(
    tmp_path: Path,
) -> None:
    filled(tmp_path, 10, 20, 30).close()
    pack = sorted((tmp_path / "packs").iterdir())[-1]
    flip(pack)
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="step 30 is damaged"):
            assert manager.restore().step == 20
        assert manager.save(25, state(25))
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 20, 25]


def test_a_rollback_that_is_not_possible_names_the_reason(tmp_path: Path) -> None:
    with filled(tmp_path, 1, 2, 3) as manager:
        with pytest.raises(StepNotFoundError, match="step 7"):
            manager.rollback(7)
        pack = sorted((tmp_path / "packs").iterdir())[0]
        pack.unlink()
        with pytest.raises(CorruptionError, match="step 1"):
            manager.rollback(1)
        manager.pin(3)
        with pytest.raises(HistoryError, match="pinned"):
            manager.rollback(2)
        assert manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("step", [20, 25])
def test_every_process_of_a_group_raises_the_same_in_the_same_call(
    tmp_path: Path, step: int
) -> None:
    def program(processes: Pretend) -> str:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            for earlier in (10, 20, 30):
                manager.save(earlier, state(earlier))
            with pytest.raises(HistoryError) as caught:
                manager.save(step, state(99))
            manager.save(40, state(40))
            assert manager.rollback(20) == [30, 40]
            with pytest.raises(StepNotFoundError):
                manager.rollback(35)
            manager.save(25, state(25))
            manager.wait_until_finished()
            assert manager.all_steps() == [10, 20, 25]
            return type(caught.value).__name__

    kind = "StepExistsError" if step == 20 else "HistoryError"
    assert play(2, program) == [kind] * 2
    assert load_checkpoint(tmp_path, 25)["step"] == 25


def test_a_restarted_group_refuses_an_old_step_at_its_first_save(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30).close()

    def program(processes: Pretend) -> str:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.restore(20)
            with pytest.raises(HistoryError) as caught:
                manager.save(25, state(25))
            return str(caught.value)

    chief, other = play(2, program)
    assert chief in other
    assert Run(tmp_path).steps() == [10, 20, 30]


def test_a_preemption_at_a_step_that_was_just_saved_reads_no_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    manager = filled(storage, 1, 2)
    read: list[str] = []
    real = storage.read_into
    monkeypatch.setattr(
        storage, "read_into", lambda name, *a: [read.append(name), real(name, *a)][1]
    )
    with pytest.raises(SystemExit) as status:
        manager.save_and_exit(2, state(2))
    assert status.value.code == 75
    assert [name for name in read if name.startswith("packs/")] == []


def test_a_save_in_progress_keeps_its_manager_alive(tmp_path: Path) -> None:
    """Taking over is only safe once the first manager is done."""
    begun, go = threading.Event(), threading.Event()

    class Slow(MemoryStorage):
        def create(self, name: str, size: int) -> Any:
            begun.set()
            assert go.wait(60)
            return super().create(name, size)

    storage = Slow()
    manager = CheckpointManager(storage)
    manager.save(1, state(1))
    assert begun.wait(60)
    first = weakref.ref(manager._saver)
    manager = CheckpointManager(storage)
    with pytest.raises(LockedError, match="this process already has a manager"):
        manager.save(2, state(2))
    assert first() is not None
    go.set()
    while first() is not None:  # until its save is done, and nothing refers to it any more
        gc.collect()
    manager.save(2, state(2))
    manager.close()
    assert verify_run(Run(storage)).good == (1, 2)


def test_retention_by_a_metric_never_takes_what_was_just_saved(tmp_path: Path) -> None:
    options = ManagerOptions(retention=Retention(best_metric="loss", best_mode="min"))
    with CheckpointManager(tmp_path, max_to_keep=1, options=options) as manager:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.7)):
            manager.save(step, state(step), {"loss": loss})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]


def test_a_forked_child_of_a_writer_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, create=True)
    run.session._pid = os.getppid()  # as a forked child finds it
    with pytest.raises(LockedError, match="which was forked from it"):
        run.begin_writing()
    assert not (tmp_path / "lock").exists()
