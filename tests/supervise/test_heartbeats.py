"""Heartbeats: what a loop says, and that it says nothing where nobody asked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from perdure import CheckpointManager, heartbeat
from perdure.runtime import heartbeats
from perdure.runtime.heartbeats import Beat, read


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


def test_a_thread_never_writes_an_older_line_over_a_newer_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop finishes a step while the thread that saves is about to write."""
    heartbeat(4)
    loop = threading.Thread(target=heartbeat, args=(5,))
    pwrite = os.pwrite

    def delayed(file: int, line: bytes, offset: int) -> int:
        if loop.ident is None:
            loop.start()
            loop.join(0.1)  # waits for the write under way, or, as a fault, ends before it
        return pwrite(file, line, offset)

    monkeypatch.setattr(os, "pwrite", delayed)
    heartbeats.saving(4)
    loop.join()
    assert (last(path).step, last(path).saving) == (5, 4)


def test_a_child_that_imports_perdure_does_not_write_over_the_loop(path: str) -> None:
    heartbeat(0)
    heartbeat(1)
    before = last(path)
    subprocess.run([sys.executable, "-c", "import perdure.runtime.heartbeats"], check=True)
    assert last(path) == before
    # The control: in a file that nobody owns, that import is a heartbeat.
    free = f"{path}-free"
    environment = {**os.environ, heartbeats.VARIABLE: free}
    line = [sys.executable, "-c", "import perdure.runtime.heartbeats"]
    subprocess.run(line, check=True, env=environment)
    assert (last(free).phase, last(free).step) == ("start", None)


def test_the_import_of_perdure_alone_is_the_first_heartbeat(path: str) -> None:
    free = f"{path}-free"
    code = "import sys, perdure; print('perdure.runtime.heartbeats' in sys.modules)"
    shown = []
    for environment in ({**os.environ, heartbeats.VARIABLE: free}, _without_variable()):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        shown.append(run.stdout)
    assert last(free).phase == "start"
    assert shown == ["True\n", "False\n"]  # without the variable it stays unloaded


def _without_variable() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != heartbeats.VARIABLE}


OWNERS = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
PARENT
child.communicate(b"go on")
print(os.getpid(), child.pid)
"""


@pytest.mark.parametrize(
    ("child", "parent", "owner", "step"),
    [
        # A child that was earlier (a data server) loses the file to the loop, and goes on reporting.
        (
            "import perdure as p; p.heartbeat(3); open('ready', 'w'); sys.stdin.read(); p.heartbeat(4)",
            "while not os.path.exists('ready'): pass\nimport perdure; perdure.heartbeat(7)",
            "parent",
            7,
        ),
        # A launcher that imports perdure and reports no step leaves the file to the loop it started.
        (
            "sys.stdin.read(); import perdure; perdure.heartbeat(3)",
            "import perdure",
            "child",
            3,
        ),
        # A child of a loop gets the file neither by its import nor by its steps.
        (
            "sys.stdin.read(); import perdure; perdure.heartbeat(3)",
            "import perdure; perdure.heartbeat(7)",
            "parent",
            7,
        ),
    ],
)
def test_one_process_owns_the_heartbeats(
    child: str, parent: str, owner: str, step: int, tmp_path: Path
) -> None:
    code = OWNERS.replace("PARENT", parent)
    path = str(tmp_path / "beats")
    run = subprocess.run(
        [sys.executable, "-c", code, f"import sys; {child}"],
        env={**os.environ, heartbeats.VARIABLE: path},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    pids: dict[str, int] = dict(zip(("parent", "child"), map(int, run.stdout.split()), strict=True))
    assert (last(path).pid, last(path).step) == (pids[owner], step)


def test_a_program_that_is_run_again_in_its_process_keeps_its_heartbeats(tmp_path: Path) -> None:
    """As some programs do, to set a variable that the loader reads."""
    code = (
        "import os, sys, perdure\n"
        "if len(sys.argv) < 2: os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
        "perdure.heartbeat(5)"
    )
    (tmp_path / "program.py").write_text(code)
    path = str(tmp_path / "beats")
    environment = {**os.environ, heartbeats.VARIABLE: path}
    subprocess.run([sys.executable, tmp_path / "program.py"], env=environment, check=True)
    assert last(path).step == 5


def test_a_command_of_perdure_leaves_the_heartbeats_to_the_program(tmp_path: Path) -> None:
    path = str(tmp_path / "beats")
    environment = {**os.environ, heartbeats.VARIABLE: path}
    command = [sys.executable, "-m", "perdure.cli", "ls", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "expected a run directory" in run.stderr
    assert read(path) is None


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
