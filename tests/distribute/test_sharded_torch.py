"""FSDP2 modules, their optimizers, and DTensors: saved by some processes, restored by others."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from group import launch, results

from perdure import verify_run
from perdure.store import Run

WORKER = "sharded_torch_worker.py"
SAVED, STEPS = 3, 6


def worker(processes: int, directory: Path, action: str, *more: str) -> list[dict[str, Any]]:
    arguments = ("--directory", str(directory), "--action", action, *more)
    return results(WORKER, processes, *arguments, forked="torch")


def fingerprint(directory: Path | str, step: int = STEPS) -> str:
    return Run(str(directory)).manifest(step).fingerprint


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes."""
    directory = tmp_path_factory.mktemp("sharded") / "run"
    assert worker(2, directory, "run") == [{"start": 0, "warnings": []}] * 2
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, whose processes were killed after its first checkpoint."""
    directory = tmp_path_factory.mktemp("sharded") / "run"
    arguments = ("--directory", str(directory), "--action", "kill")
    ended = launch(WORKER, 2, *arguments, forked="torch")
    assert [status for status, _, _ in ended] == [-signal.SIGKILL] * 2
    assert Run(directory).steps() == [SAVED]
    return directory


def test_a_killed_run_resumes_with_the_bits_of_the_undisturbed_one(
    undisturbed: Path, killed: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(killed, tmp_path / "run"))
    assert worker(2, directory, "resume") == [{"start": SAVED, "warnings": []}] * 2
    assert fingerprint(directory) == fingerprint(undisturbed)


def test_every_process_writes_a_part(undisturbed: Path) -> None:
    packs = {pack.name.split("-")[1] for pack in Run(undisturbed).manifest(STEPS).packs}
    assert packs == {"00000", "00001"}
    assert verify_run(Run(undisturbed)).problems == ()


@pytest.mark.parametrize(("processes", "two"), [(1, 0), (3, 0), (4, 1)])
def test_other_processes_and_meshes_restore_the_same_leaves(
    undisturbed: Path, tmp_path: Path, processes: int, two: int
) -> None:
    """Saved again by these processes, the state has the same fingerprint."""
    link = tmp_path / "run"
    link.symlink_to(undisturbed)
    reports = worker(processes, link, "restore", "--two", str(two))
    for report in reports:
        assert report["equal"]
        assert report["placements"]
        assert report["moments"]
        assert report["recipe"].startswith("RecipeMismatchError")
        assert f"the checkpoint has 2, this run has {processes}" in report["recipe"]
        assert ("_StridedShard" in str(report["model"])) == bool(two)
        if two:
            assert report["drifted"].startswith("StateError")
            assert "w: process 2 holds other bits than process 0" in report["drifted"]
    assert fingerprint(f"{link}-again") == fingerprint(undisturbed)
    (warning,) = reports[0]["warnings"]
    assert f"saved by 2 processes, and this run has {processes}" in warning
    assert all(report["warnings"] == [] for report in reports[1:])


def test_a_plain_state_without_a_group_restores_them_too(undisturbed: Path, tmp_path: Path) -> None:
    link = tmp_path / "run"
    link.symlink_to(undisturbed)
    (report,) = worker(1, link, "alone")
    assert report["equal"]
    assert "init_process_group" in report["no_group"]
    assert fingerprint(f"{link}-again") == fingerprint(undisturbed)


def test_a_resume_on_other_processes_warns_and_has_other_bits(
    undisturbed: Path, killed: Path, tmp_path: Path
) -> None:
    """The negative control of the resume: the gradients of three batches are added."""
    directory = Path(shutil.copytree(killed, tmp_path / "run"))
    reports = worker(3, directory, "resume")
    (warning,) = reports[0]["warnings"]
    assert "will not have the bits" in warning
    assert fingerprint(directory) != fingerprint(undisturbed)


def test_what_a_group_refuses(tmp_path: Path) -> None:
    reports = worker(3, tmp_path, "errors")
    for process, report in enumerate(reports):
        assert "perdure.torch.process_group()" in report["no_processes"]
        assert report["alone"].startswith("UnsupportedLeafError: tree/")
        assert "processes=perdure.torch.process_group()" in report["alone"]
        assert report["per_rank"].startswith("UnsupportedLeafError: mine/rank")
        assert report["partial"].startswith("UnsupportedLeafError: net/sum: ")
        assert "Partial" in report["partial"]
        assert "is not one block of the tensor" in report["strided"]
        assert report["steps"].startswith("StateError")
        assert "process 0: 1, process 1: 2, process 2: 3" in report["steps"]
        assert report["good"] == ""
        assert "tree/even: expected float32[4,7]" in report["shape"]
        assert report["subgroup"] == [[0, 2, [0, 2]], [0, 1, [1]], [1, 2, [0, 2]]][process]
        assert f"this process, number {process}" in report["not_a_member"]
