"""What a run of the drill sees of the working directory, and what it leaves of the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.drill import working_directory
from perdure.drill.fault_injection import PLAN, RUNS, FaultInjector
from perdure.drill.working_directory import WorkingDirectory
from perdure.drill.written_files import EVENTS
from perdure.store import LocalStorage, Run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in a repository, with an earlier run, data beside it, and much that is odd."""
    monkeypatch.setattr(working_directory, "MOST_ENTRIES", 50)
    top = tmp_path / "repository"
    project = top / "project"
    for name in ("runs/x", "runs/plots", "data/many", ".git", "cache", "empty"):
        (project / name).mkdir(parents=True)
    (top / "beside").mkdir()
    (top / "beside" / "a.txt").write_text("a")
    with Run(project / "runs" / "x", create=True) as run:
        run.save(9, {})
    (project / "runs" / "plots" / "p.svg").write_text("p")
    (project / "train.py").write_text("print(__file__)")
    (project / "weights.bin").write_bytes(bytes(working_directory.LARGEST_COPY + 1))
    for number in range(working_directory.MOST_ENTRIES + 1):
        (project / "data" / "many" / str(number)).touch()
    (project / "data" / "some.csv").write_text("1")
    (project / "latest").symlink_to("runs/x")
    (project / "gone").symlink_to("nowhere")
    (project / "loop").symlink_to("..")
    (project / "elsewhere").symlink_to(top / "beside")
    (project / "cache" / "pyvenv.cfg").touch()
    os.mkfifo(project / "pipe")
    return project


def copied(project: Path, directory: Path, **options: object) -> tuple[Path, Path]:
    """A copy of `project`; returns the root, and the working directory below it."""
    directory.mkdir()
    root = WorkingDirectory(project, **options).make(directory)  # type: ignore[arg-type]
    return root, Path(str(root) + os.path.realpath(project))


def test_a_program_finds_what_it_would_find_on_the_first_day(project: Path, tmp_path: Path) -> None:
    _, copy = copied(project, tmp_path / "run")
    assert sorted(os.listdir(copy)) == sorted(os.listdir(project))
    assert (copy / "data" / "some.csv").read_text() == "1"
    assert len(os.listdir(copy / "data" / "many")) == working_directory.MOST_ENTRIES + 1
    assert (copy / ".." / "beside" / "a.txt").read_text() == "a", "the parents are the same"
    assert (copy / "elsewhere" / "a.txt").read_text() == "a"
    assert (copy / "runs" / "plots" / "p.svg").read_text() == "p"
    assert (copy / "weights.bin").stat().st_size == working_directory.LARGEST_COPY + 1
    assert not (copy / "runs" / "x").exists(), "an earlier run is not continued"
    assert not (copy / "latest").exists()
    linked = {entry.name for entry in os.scandir(copy) if entry.is_symlink()}
    assert linked == {".git", "cache", "gone", "latest", "loop", "pipe", "weights.bin"}
    assert (copy / "train.py").stat().st_mtime == (project / "train.py").stat().st_mtime


def test_what_a_program_writes_and_removes_is_its_own(project: Path, tmp_path: Path) -> None:
    _, copy = copied(project, tmp_path / "run")
    before = sorted(path for path in project.rglob("*") if "many" not in path.parts)
    shutil.rmtree(copy / "runs")
    (copy / "data" / "new.txt").write_text("n")
    (copy / "empty" / "new.txt").write_text("n")
    (copy / "elsewhere" / "a.txt").write_text("other")
    (copy / "train.py").write_text("other")
    assert sorted(path for path in project.rglob("*") if "many" not in path.parts) == before
    assert Run(project / "runs" / "x").steps() == [9]
    assert (project / "train.py").read_text() == "print(__file__)"
    assert (project / "elsewhere" / "a.txt").read_text() == "a"


def test_a_run_that_is_only_read_is_there_and_the_drill_is_not(
    project: Path, tmp_path: Path
) -> None:
    drill = project / "drill"
    drill.mkdir()
    only_read = [os.path.realpath(project / "runs" / "x")]
    _, copy = copied(project, drill / "run", left_out=[drill], read_only=only_read)
    assert Run(copy / "runs" / "x").steps() == [9]
    assert not (copy / "drill").exists()


def test_little_is_copied(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the limits: beyond them everything is linked, and still found."""
    monkeypatch.setattr(working_directory, "COPIED_BYTES", 2)
    monkeypatch.setattr(working_directory, "MOST_ENTRIES", 0)
    _, copy = copied(project, tmp_path / "run")
    assert (copy / "train.py").is_symlink()
    assert (copy / "data").is_symlink()
    assert not (copy / "runs").is_symlink(), "a run directory is in it"
    assert not (copy / "runs" / "x").exists()
    assert (copy / "train.py").read_text() == "print(__file__)"


def test_a_command_begins_in_the_copy(project: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    working = WorkingDirectory(project)
    root = working.make(tmp_path / "run")
    for script in ("train.py", str(project / "train.py")):
        command = working.command(root, [sys.executable, script, "/bin/sh"])
        assert command[-1] == "/bin/sh"
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        at = Path(done.stdout.strip())
        assert (Path(str(root) + str(project)) / at).resolve().is_relative_to(root)


def test_a_run_directory_is_used_where_the_program_names_it(project: Path, tmp_path: Path) -> None:
    """Inside of the copy, by whatever path; elsewhere it is redirected, and that is reported."""
    _, copy = copied(project, tmp_path / "run")
    (tmp_path / "run" / PLAN).write_text(json.dumps({"attempt": 1, "faults": []}))
    injector = FaultInjector(tmp_path / "run")
    for named in (copy / "runs" / "x", project / "runs" / "x", LocalStorage(copy / "runs" / "x")):
        storage = injector.storage(named)
        assert isinstance(storage, LocalStorage)
        assert storage.where == str(copy / "runs" / "x")
    (link,) = (tmp_path / "run" / RUNS).iterdir()
    assert link.readlink() == copy / "runs" / "x"
    elsewhere = (tmp_path / "scratch", project / "data" / "many" / "x", "s3://bucket/x")
    for named in elsewhere:
        storage = injector.storage(named)
        assert isinstance(storage, LocalStorage)
        assert Path(storage.where).is_relative_to(tmp_path / "run")
    assert not (tmp_path / "scratch").exists()
    events = [json.loads(line) for line in (tmp_path / "run" / EVENTS).read_text().splitlines()]
    opened = [(event["name"], event.get("redirected", False)) for event in events]
    x = str(project / "runs" / "x")
    assert opened == [(x, False), (x, True), (x, False), *((str(name), True) for name in elsewhere)]
