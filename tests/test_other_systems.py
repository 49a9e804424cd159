"""What perdure does on Windows and on macOS.

On Linux each process gets the modules of the other system (`other_systems/sitecustomize.py`). On
Windows and on macOS the same tests run as they are, those of the other system excepted; the
environment variable PERDURE_WRITTEN_RUN names a folder that `other_systems/written_run.py` has
written on Linux.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("other_systems")
HERE = {"win32": "windows", "darwin": "macos"}.get(sys.platform)
WRITTEN = "PERDURE_WRITTEN_RUN"

# What a module of perdure may not use on a system. The first word says how it fails.
CONTROLS = {
    "windows": """
        ModuleNotFoundError import fcntl
        ModuleNotFoundError import resource
        ImportError from os import O_CLOEXEC
        AttributeError import os; os.pread
        AttributeError import os; os.uname
        AttributeError import os; os.register_at_fork
        AttributeError import errno; errno.ENOKEY
        AttributeError import signal; signal.SIGKILL
        AttributeError import time; time.clock_gettime
        AttributeError import mmap; mmap.MAP_PRIVATE
        TypeError import mmap; mmap.mmap(-1, 9, flags=2)
        PermissionError import os; os.open('.', os.O_RDONLY)
        AssertionError import os; os.read(os.open('file', os.O_RDONLY), 1)
        AssertionError open('file')
        FileNotFoundError open('/proc/self/stat', 'rb')
    """,
    "macos": """
        ImportError from os import O_DIRECT
        AttributeError import os; os.sched_getaffinity
        AttributeError import os; os.pidfd_open
        AttributeError import errno; errno.EREMOTEIO
        AttributeError import socket; socket.SO_PEERCRED
        AttributeError import fcntl; fcntl.F_ADD_SEALS
        FileNotFoundError import os; os.listdir('/proc')
        FileNotFoundError import os; os.stat('/dev/shm')
    """,
}
CONTROL = """
import sys
for line in sys.argv[1].strip().splitlines():
    expected, _, code = line.strip().partition(" ")
    exec(code.split(";")[0] if code.startswith("import os") else "", {"__name__": "__main__"})
    try:
        exec(code, {"__name__": "perdure.control"})
        found = "nothing"
    except Exception as error:
        found = type(error).__name__
    assert found == expected, f"{code}: expected {expected}, found {found}"
"""

TRAINING = """
import os, signal, subprocess, sys
import numpy as np
import perdure

with perdure.CheckpointManager("run") as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(4), "step": 0})
    # A child that imports perdure, as a data worker does, leaves the heartbeat to its parent.
    subprocess.run([sys.executable, "-c", "import perdure"], check=True)
    for step in range(start + 1, 7):
        if step == 4 and os.environ["PERDURE_ATTEMPT"] == "1":
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"w": state["w"] + 1, "step": step}
        manager.save(step, state)
"""


def run_python(
    system: str, *arguments: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python as on `system`; skips the test on a third one."""
    if HERE not in (None, system):
        pytest.skip(f"a test of {system}, and this is {HERE}")
    environment = dict(os.environ)
    if HERE is None:
        environment |= {"PERDURE_TEST_SYSTEM": system, "PYTHONPATH": str(PROGRAMS)}
        if system == "windows":
            environment["PYTHONWARNDEFAULTENCODING"] = "1"
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def require_one_sentence(text: str) -> None:
    """One sentence that ends, with the reason in it, and no traceback."""
    line = text.strip()
    assert "\n" not in line, line
    assert line.endswith("."), line
    assert ". " not in line, line


@pytest.fixture(scope="module")
def written() -> Iterator[Path]:
    """A folder with a run that plain Linux has written, and what it has read from it."""
    if where := os.environ.get(WRITTEN):
        yield Path(where).resolve()
        return
    if HERE == "windows":
        pytest.skip(f"set {WRITTEN} to a folder that tests/other_systems/written_run.py wrote")
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAMS / "written_run.py"
        subprocess.run([sys.executable, program, folder], check=True, capture_output=True)
        yield Path(folder)


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.mark.skipif(HERE is not None, reason=f"{HERE} itself takes Linux away")
@pytest.mark.parametrize("system", ["windows", "macos"])
def test_what_only_linux_has_is_not_there(tmp_path: Path, system: str) -> None:
    (tmp_path / "file").write_text("a line\n")
    done = run_python(system, "-c", CONTROL, CONTROLS[system], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def read_on(written: Path) -> Any:
    """Returns what `reading.py` finds on a system, once for all tests."""
    found: dict[str, Any] = {}

    def read(system: str) -> Any:
        if system not in found:
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "output"
                found[system] = answer(run_python(system, PROGRAMS / "reading.py", written, output))
        return found[system]

    return read


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_a_run_of_linux_is_read_elsewhere(written: Path, read_on: Any, system: str) -> None:
    before = contents(written / "run")
    expected = json.loads((written / "answer.json").read_text(encoding="utf-8"))
    found = read_on(system)
    assert found["leaves"] == expected["leaves"]
    assert found["restored"] == expected["restored"]
    assert found["page"]
    for command in ("ls", "show", "stats", "diff", "verify"):
        assert found["commands"][command] == expected["commands"][command], command
    assert found["commands"]["report"][0] == 0, found["commands"]["report"][1]
    assert contents(written / "run") == before


def test_a_checkpoint_is_exported_on_macos(written: Path, read_on: Any) -> None:
    expected = json.loads((written / "answer.json").read_text(encoding="utf-8"))
    assert read_on("macos")["commands"]["export"][0] == 0
    assert read_on("macos")["exported"] == expected["exported"] != ""


def test_a_checkpoint_is_exported_on_windows(written: Path, read_on: Any) -> None:
    found = read_on("windows")
    expected = json.loads((written / "answer.json").read_text(encoding="utf-8"))
    assert found["commands"]["export"] == expected["commands"]["export"]
    assert found["exported"] == expected["exported"]


def test_windows_refuses_to_save_in_one_sentence(written: Path) -> None:
    before = contents(written / "run")
    done = run_python("windows", PROGRAMS / "saving.py", "refuse", written / "run")
    found = answer(done)
    assert set(found) == {"save", "new", "open"}
    for kind, text in found.values():
        assert kind == "SaveError"
        assert "fcntl" in text
        require_one_sentence(text)
    assert contents(written / "run") == before


@pytest.mark.parametrize("command", ["run", "drill"])
def test_windows_refuses_to_start_workers_in_one_sentence(tmp_path: Path, command: str) -> None:
    done = run_python("windows", "-m", "perdure", command, "--", "python", "x.py", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"`perdure {command}`" in done.stderr
    require_one_sentence(done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operation", ["fsync packs", "link checkpoints"])
def test_a_save_on_macos_that_is_killed_leaves_the_one_before(
    tmp_path: Path, operation: str
) -> None:
    run, program = tmp_path / "run", PROGRAMS / "saving.py"
    killed = run_python("macos", program, "kill", run, operation)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = answer(run_python("macos", program, "resume", run))
    assert found["restored"] == [1, found["expected"]]
    assert found["steps"] == [3, 4]  # of 1 to 4, the others are pruned
    assert found["last"] == found["last_expected"]
    for kind, text in (found["here"], found["elsewhere"]):
        assert kind == "LockedError", text
    # Every sync of a file and of a folder goes to the disk itself; three saves make at least these.
    assert found["synced"] == found["asked"]
    assert found["synced"][0] >= 6
    assert found["synced"][1] >= 6


def test_perdure_run_restarts_a_killed_program_on_macos(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = ("-m", "perdure", "run", "--json", "--", sys.executable, script)
    done = run_python("macos", *command, cwd=tmp_path)
    found = answer(done)
    assert [attempt["kind"] for attempt in found["attempts"]] == ["killed", "done"]
    assert [(each["start"], each["end"]) for each in found["attempts"]] == [(0, 3), (3, 6)]
    assert "/proc" in done.stderr  # what is not ended without it


def test_warm_processes_are_refused_on_macos_in_one_sentence(tmp_path: Path) -> None:
    command = ("-m", "perdure", "run", "--warm", "numpy", "--", sys.executable, "-c", "pass")
    done = run_python("macos", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "--warm needs Linux" in done.stderr
    require_one_sentence(done.stderr)
    assert list(tmp_path.iterdir()) == []
