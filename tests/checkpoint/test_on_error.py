"""`on_error`: a save that fails is raised, or warned about and repeated, and never hidden."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, LocalStorage, ManagerOptions, verify_run
from perdure.errors import ArgumentError, LockedError, PruneError, SaveError
from perdure.store import Run

CONTINUE = ManagerOptions(on_error="continue")


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(1000, k, np.float32), "step": k}


class Faulty:
    """A `before` hook that fails one kind of operation while `on`, and counts."""

    def __init__(self, operation: str = "fsync", code: int = errno.ENOSPC, part: str = "") -> None:
        self.operation, self.code, self.part = operation, code, part
        self.on = False
        self.fired = 0

    def __call__(self, operation: str, path: str) -> None:
        if self.on and operation == self.operation and self.part in path:
            self.fired += 1
            raise OSError(self.code, os.strerror(self.code), path)


def test_continue_warns_and_saves_again_when_there_is_space(tmp_path: Path) -> None:
    fault = Faulty()
    with CheckpointManager(LocalStorage(tmp_path, fault), options=CONTINUE) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        fault.on = True
        assert manager.save(2, state(2))
        with pytest.warns(UserWarning, match=r"saving step 2 failed.*Training continues"):
            manager.wait_until_finished()
        assert manager.save(3, state(3))
        while manager.is_saving_in_progress():
            os.sched_yield()
        with pytest.warns(UserWarning, match="saving step 3 failed"):
            assert manager.save(4, state(4))
        with pytest.warns(UserWarning, match="saving step 4 failed"):
            manager.wait_until_finished()
        assert manager.all_steps() == [1]
        assert manager.restore().step == 1
        fault.on = False
        manager.save(5, state(5))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 5]
    assert fault.fired >= 3
    assert verify_run(Run(tmp_path)).ok


def test_continue_warns_if_the_lock_cannot_be_taken(tmp_path: Path) -> None:
    fault = Faulty("mkdir", errno.EACCES)
    fault.on = True
    manager = CheckpointManager(LocalStorage(tmp_path / "run", fault), options=CONTINUE)
    with pytest.warns(UserWarning, match="cannot be written to: .*Permission denied"):
        assert not manager.save(1, state(1))
    fault.on = False
    assert manager.save(2, state(2))
    manager.close()
    assert manager.all_steps() == [2]


def test_continue_warns_at_close(tmp_path: Path) -> None:
    fault = Faulty()
    manager = CheckpointManager(LocalStorage(tmp_path, fault), options=CONTINUE)
    manager.save(1, state(1))
    manager.wait_until_finished()
    fault.on = True
    manager.save(2, state(2))
    with pytest.warns(UserWarning, match="saving step 2 failed"):
        manager.close()


def test_a_last_save_that_fails_is_never_reported_as_saved(tmp_path: Path) -> None:
    """Exit status 75 promises a committed state, so `continue` does not apply to it."""
    fault = Faulty()
    manager = CheckpointManager(LocalStorage(tmp_path, fault), options=CONTINUE)
    manager.save(1, state(1))
    manager.wait_until_finished()
    fault.on = True
    with pytest.raises(SaveError, match="saving step 2 failed"):
        manager.save_and_exit(2, state(2))
    manager.close()
    assert fault.fired


def test_continue_raises_for_a_second_writer(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path, options=CONTINUE) as first,
        CheckpointManager(tmp_path, options=CONTINUE) as second,
    ):
        first.save(1, state(1))
        with pytest.raises(LockedError):
            second.save(1, state(1))


@pytest.mark.parametrize("on_error", ["raise", "continue"])
def test_a_prune_that_cannot_delete_loses_no_checkpoint(tmp_path: Path, on_error: Any) -> None:
    fault = Faulty("unlink", errno.EACCES, "checkpoints/000000000001.json")
    options = ManagerOptions(on_error=on_error)
    storage = LocalStorage(tmp_path, fault)
    with CheckpointManager(storage, max_to_keep=1, options=options) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        fault.part, fault.on = "000000000001.json", True
        manager.save(2, state(2))
        if on_error == "raise":
            with pytest.raises(PruneError, match="deleting stopped in the middle"):
                manager.wait_until_finished()
        else:
            with pytest.warns(UserWarning, match="deleting stopped in the middle"):
                manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        fault.on = False
        manager.save(3, state(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [3]
    assert fault.fired
    assert verify_run(Run(tmp_path)).problems == ()


@pytest.mark.parametrize("finder", ["reread", "compaction"])
def test_a_damaged_pack_is_reported_repaired_and_stops_no_training(
    tmp_path: Path, finder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if finder == "compaction":
        monkeypatch.setattr("perdure.store.damage.Cursor.advance", lambda *_: [])
    big = {"bulk": np.arange(4 * 1024 * 1024, dtype=np.float32), "base": np.ones(1000)}
    small = {"bulk": np.zeros(1), "base": np.ones(1000)}
    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(1, big)
        manager.wait_until_finished()
        pack = next((tmp_path / "packs").iterdir())
        (base,) = [leaf for leaf in Run(tmp_path).manifest(1).leaves if leaf.path == "base"]
        data = bytearray(pack.read_bytes())
        data[base.chunks[0].offset] ^= 1
        pack.write_bytes(data)
        manager.save(2, small)
        repaired = "written again from the state in memory"
        first = repaired if finder == "reread" else r"was not compacted: .*expected hash"
        with pytest.warns(UserWarning, match=first) as warned:
            manager.wait_until_finished()
        assert len(warned) == 1
        manager.save(3, {**small, "new": np.arange(9)})
        if finder == "compaction":
            with pytest.warns(UserWarning, match=repaired):
                manager.wait_until_finished()
        manager.save(4, {**small, "new": np.arange(10)})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.wait_until_finished()
    assert verify_run(Run(tmp_path)).good == (4,)


def test_a_slow_disk_delays_the_next_save_and_loses_none(tmp_path: Path) -> None:
    reached, release = threading.Event(), threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "fsync" and "000000000001-" in path:
            reached.set()
            assert release.wait(60)

    with CheckpointManager(LocalStorage(tmp_path, before)) as manager:
        manager.save(1, state(1))
        assert reached.wait(60)
        second = threading.Thread(target=manager.save, args=(2, state(2)))
        second.start()
        assert manager.all_steps() == []
        release.set()
        second.join()
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ArgumentError, match="on_error: expected one of 'raise', 'continue', found"):
        ManagerOptions(on_error="skip")  # type: ignore[arg-type]


def test_warnings_name_the_line_of_the_caller(tmp_path: Path) -> None:
    fault = Faulty()
    with CheckpointManager(
        LocalStorage(tmp_path, fault), options=CONTINUE, recipe={"lr": 1}, allow=("lr",)
    ) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        manager.save(2, state(2))
        manager.wait_until_finished()
    pack = max((tmp_path / "packs").glob("000000000002-*"))
    pack.write_bytes(bytes(pack.stat().st_size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CheckpointManager(
            LocalStorage(tmp_path, fault), options=CONTINUE, recipe={"lr": 2}, allow=("lr",)
        ) as manager:
            manager.restore(like=state(0))  # damaged, and another recipe
            fault.on = True
            manager.save(3, state(3))
            manager.wait_until_finished()
    assert len(caught) == 3
    assert {warning.filename for warning in caught} == {__file__}
