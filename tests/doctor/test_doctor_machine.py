"""What `perdure doctor` reports of a machine and of the file system of a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.doctor import machine
from perdure.doctor.machine import check_file_system, cpu_limit, describe_machine


def checked(run: Path) -> dict[str, tuple[bool, str]]:
    return {check.name: (check.is_right, check.found) for check in check_file_system(str(run))}


def test_a_local_file_system_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = checked(tmp_path / "runs" / "none yet")
    assert list(found) == ["place", "free space", "fsync", "hard links", "lock"]
    assert all(is_right for is_right, _ in found.values()), found
    assert found["place"][1].startswith(f"{tmp_path} (")
    assert found["lock"][1] == "a second writer is refused"
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_lets_two_in_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = SimpleNamespace(release=lambda: None)
    monkeypatch.setattr(machine, "acquire", lambda *_: lock)
    is_right, found = checked(tmp_path)["lock"]
    assert (is_right, "two may write at once" in found) == (False, True)
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_replaces_is_wrong_and_none_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: None)
    assert not checked(tmp_path)["hard links"][0]

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert checked(tmp_path)["hard links"] == (
        True,
        "not there (not permitted); files are renamed, and a fork copies its packs",
    )
    monkeypatch.setattr(os, "fsync", lambda _: refuse())
    assert not checked(tmp_path)["fsync"][0]


def test_a_place_that_cannot_hold_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert checked(tmp_path / "file" / "run") == {
        "place": (False, f"{tmp_path / 'file'} is no directory")
    }
    (row,) = check_file_system("s3://bucket/run")
    assert row.is_right


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_cgroup(tmp_path: Path, files: dict[str, str], limit: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_limit(tmp_path) == limit


def test_the_machine_names_variables_that_decide_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = describe_machine()
    assert found["MKL_CBWR"] == "AVX2"
    assert found["OMP_NUM_THREADS"] == "not set"
    assert "ONEDNN_MAX_CPU_ISA" not in found
    assert "perdure " in found["versions"]
    assert " of " in found["cores"]
    assert "GiB" in found["memory"]
