"""Heartbeats: what a loop says, and that it says nothing where nobody asked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from perdure import CheckpointManager, heartbeat, heartbeats
from perdure.heartbeats import Beat, read


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = str(tmp_path / "heartbeat")
    monkeypatch.setenv(heartbeats.VARIABLE, path)
    heartbeats.open_file()
    yield path
    monkeypatch.delenv(heartbeats.VARIABLE, raising=False)
    heartbeats.open_file()


def last(path: str) -> Beat:
    found = read(path)
    assert found is not None
    return found


def test_nothing_is_written_where_nobody_asked(tmp_path: Path) -> None:
    assert heartbeats._writer is None
    heartbeat(3)
    assert list(tmp_path.iterdir()) == []
    assert read(str(tmp_path / "heartbeat")) is None


def test_the_first_step_is_the_compilers(path: str) -> None:
    assert (last(path).phase, last(path).step, last(path).pid) == ("start", None, os.getpid())
    heartbeat(5, "compile")
    heartbeat(5)
    assert (last(path).phase, last(path).start, last(path).first) == ("compile", 5, None)
    heartbeat(6)
    found = last(path)
    assert (found.phase, found.step, found.start) == ("step", 6, 5)
    assert found.first is not None
    heartbeat(7)
    assert last(path).first == found.first
    assert last(path).time > found.time
    assert Path(path).stat().st_size == heartbeats.LENGTH


def test_a_second_run_in_one_process_begins_anew(path: str) -> None:
    heartbeat(5, "compile")
    heartbeat(9)
    assert last(path).first_step == 9
    heartbeat(0, "compile")
    assert (last(path).start, last(path).first, last(path).first_step) == (0, None, None)


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="phase: expected one of start, restore"):
        heartbeat(1, "thinking")


def test_a_forked_child_says_nothing(path: str) -> None:
    heartbeat(1)
    before = last(path)
    child = os.fork()
    if child == 0:
        heartbeat(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert last(path) == before


def test_a_manager_tells_without_a_change_to_the_loop(path: str, tmp_path: Path) -> None:
    phases = []
    with CheckpointManager(tmp_path / "run", save_interval_steps=2) as manager:
        state, start = manager.restore_or_initialize({"w": np.zeros(3)})
        phases.append(last(path).phase)
        for step in range(start, 4):
            state["w"] += 1
            manager.save(step + 1, state)
            phases.append(last(path).phase)
            assert last(path).step == step + 1
        manager.wait_until_finished()
        assert last(path).saving is None
    assert phases == ["compile", "step", "step", "step", "step"]
    assert (last(path).phase, last(path).start) == ("end", 0)


def test_a_child_that_imports_perdure_does_not_write_over_the_loop(path: str) -> None:
    heartbeat(0)
    heartbeat(1)
    before = last(path)
    subprocess.run([sys.executable, "-c", "import perdure.heartbeats"], check=True)
    assert last(path) == before
    # The control: with the variable, that import is a heartbeat.
    environment = {**os.environ, heartbeats.VARIABLE: path}
    line = [sys.executable, "-c", "import perdure.heartbeats"]
    subprocess.run(line, check=True, env=environment)
    assert (last(path).phase, last(path).step) == ("start", None)


def test_a_heartbeat_that_cannot_be_written_is_told_once_and_ends_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.warns(UserWarning, match="heartbeat cannot be written: .*No space left"):
        heartbeat(1)
    heartbeat(2)  # a second warning would be an error here


def test_a_heartbeat_that_cannot_be_opened_ends_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeats.VARIABLE, f"{path}/nowhere")
    with pytest.warns(UserWarning, match="heartbeat cannot be written"):
        heartbeats.open_file()
    heartbeat(1)
