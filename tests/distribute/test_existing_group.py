"""A strategy joins a group that the program initialized in the framework."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from group import results

from perdure.distribute import Cluster, SimpleClusterResolver
from perdure.distribute.cluster import resolve_for, with_existing
from perdure.errors import ClusterError
from perdure.runtime.process_group import FrameworkGroup


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_group_that_the_program_initialized_is_joined(tmp_path: Path, engine: str) -> None:
    options = ("--engine", engine, "--directory", str(tmp_path))
    reports = results("existing_worker.py", 2, *options, forked=engine)
    assert [report["place"] for report in reports] == [[0, 2, True], [1, 2, False]]
    for process, report in enumerate(reports):
        assert report["same"]
        assert report["sum"] == 15.0
        assert report["steps"] == [1]
        assert report["mine"] == [process] * 3
        call = {
            "jax": "perdure.initialize_distributed('jax')",
            "torch": "perdure.torch.process_group()",
        }
        assert call[engine] in report["refused"]
    if engine == "torch":
        assert all(report["ddp"]["resumed"] for report in reports)
        assert reports[0]["ddp"]["buffers"] != reports[1]["ddp"]["buffers"]


def group(count: int, index: int = 1) -> Any:
    return lambda engine: FrameworkGroup(engine, index, count, "host:99")


def test_without_a_description_the_group_of_the_framework_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[with_existing.__module__], "framework_group", group(2))
    alone = Cluster(None, 1, 0, source="the environment")
    assert with_existing(alone, "jax") == Cluster("host:99", 2, 1, source="jax.distributed")
    slurm = Cluster("host:1", 2, 1, source="Slurm")
    assert with_existing(slurm, "jax") is slurm


@pytest.mark.parametrize("given", [(None, 1, 0), ("a:1", 2, 0), ("a:1", 3, 1)])
def test_a_description_that_contradicts_the_framework_is_an_error(
    monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setattr(sys.modules[with_existing.__module__], "framework_group", group(2))
    with pytest.raises(ClusterError, match=r"initialized as process 1 of 2"):
        with_existing(SimpleClusterResolver(*given).cluster(), "torch")


def test_an_incomplete_description_is_ignored_if_the_framework_has_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
    with pytest.raises(ClusterError, match="lacks RANK"):
        resolve_for("torch", None, half)
    monkeypatch.setattr(sys.modules[with_existing.__module__], "framework_group", group(2))
    assert resolve_for("torch", None, half).process_id == 1
    with pytest.raises(ClusterError, match="lacks RANK"):
        resolve_for("torch", "torchrun", half)
