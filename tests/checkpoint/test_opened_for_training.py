"""A loop finds out before its first step that it cannot save; whoever only reads takes no lock."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, ManagerOptions, load_checkpoint
from perdure.errors import LockedError, SaveError
from perdure.store import LocalStorage, Run
from pretend import Pretend, play

STATE = {"w": np.arange(3)}


def trained(directory: Path) -> None:
    with CheckpointManager(directory) as manager:
        manager.save(1, STATE)


def test_a_second_trainer_is_refused_before_its_first_step(tmp_path: Path) -> None:
    made: list[int] = []

    def init() -> Any:
        made.append(1)
        return STATE

    with CheckpointManager(tmp_path, save_interval_steps=100) as first:
        first.restore_or_initialize(STATE)
        assert Run(tmp_path).steps() == []
        with CheckpointManager(tmp_path) as second:
            with pytest.raises(LockedError, match="To read beside it, call `restore`"):
                second.restore_or_initialize(init)
            assert made == [], "before the state is made, which may take long"
            with pytest.raises(LockedError):
                second.save(1, STATE)
    with CheckpointManager(tmp_path) as third:
        assert third.restore_or_initialize(init).step == 0
    assert made == [1]


def test_a_loop_that_restores_by_itself_is_refused_at_its_first_call_of_save(
    tmp_path: Path,
) -> None:
    trained(tmp_path)
    with (
        CheckpointManager(tmp_path, save_interval_steps=100) as first,
        CheckpointManager(tmp_path, save_interval_steps=100) as second,
    ):
        assert [first.restore().step, second.restore().step] == [1, 1]
        assert first.save(2, STATE) is False, "it is not time to save"
        with pytest.raises(LockedError):
            second.save(2, STATE)


def test_who_only_reads_takes_no_lock_and_is_not_kept_out(tmp_path: Path) -> None:
    trained(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with CheckpointManager(tmp_path) as reader:
        assert (reader.restore().step, reader.restore(like=STATE).step) == (1, 1)
        assert reader.should_save(5)
        assert reader.latest_step() == 1
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    with CheckpointManager(tmp_path) as writer:
        writer.restore_or_initialize(STATE)
        with CheckpointManager(tmp_path) as reader:
            assert reader.restore(like=STATE).step == 1
        assert load_checkpoint(tmp_path)["w"].tolist() == [0, 1, 2]


def refusing(fired: list[str]) -> Any:
    def before(operation: str, path: str) -> None:
        fired.append(operation)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    return before


def test_a_disk_that_cannot_be_written_to_is_reported_before_the_first_step(
    tmp_path: Path,
) -> None:
    fired: list[str] = []
    storage = LocalStorage(tmp_path / "run", refusing(fired))
    with (
        CheckpointManager(storage) as manager,
        pytest.raises(SaveError, match="cannot be written to"),
    ):
        manager.restore_or_initialize(STATE)
    assert fired


def test_on_error_continue_makes_that_a_warning(tmp_path: Path) -> None:
    fired: list[str] = []
    storage = LocalStorage(tmp_path / "run", refusing(fired))
    with (
        CheckpointManager(storage, options=ManagerOptions(on_error="continue")) as manager,
        pytest.warns(UserWarning, match=r"cannot be written to.*Training continues"),
    ):
        assert manager.restore_or_initialize(STATE).step == 0
    assert fired


def test_in_a_group_every_process_is_refused(tmp_path: Path) -> None:
    def member(processes: Pretend) -> str:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            try:
                manager.restore_or_initialize(STATE)
            except LockedError as error:
                return str(error)
            return ""

    with CheckpointManager(tmp_path) as first:
        first.restore_or_initialize(STATE)
        refused = play(2, member)
    assert all("To read beside it" in text for text in refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert play(2, member) == ["", ""]
