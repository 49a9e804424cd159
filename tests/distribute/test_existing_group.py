"""A group that the program made in the framework is joined, and nobody takes itself for alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from group import results

from perdure.distribute import Cluster, SimpleClusterResolver
from perdure.distribute.cluster import resolve_for, with_existing
from perdure.errors import ClusterError
from perdure.state.framework_group import FrameworkGroup


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_group_that_the_program_initialized_is_joined(tmp_path: Path, engine: str) -> None:
    options = ("--engine", engine, "--directory", str(tmp_path))
    found = results("existing_worker.py", 2, *options, forked=engine)
    assert [each["place"] for each in found] == [[0, 2, True], [1, 2, False]]
    for process, each in enumerate(found):
        assert each["same"]
        assert each["sum"] == 15.0
        assert each["steps"] == [1]
        assert each["mine"] == [process] * 3
        assert f"perdure.initialize_distributed('{engine}')" in each["refused"]
    if engine == "torch":
        assert all(each["ddp"]["resumed"] for each in found)
        assert found[0]["ddp"]["buffers"] != found[1]["ddp"]["buffers"]


def group(count: int, index: int = 1) -> Any:
    return lambda engine: FrameworkGroup(engine, index, count, "host:99")


def test_who_described_nothing_belongs_to_the_group_of_the_framework(
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


def test_half_a_description_is_none_where_the_framework_has_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
    with pytest.raises(ClusterError, match="lacks RANK"):
        resolve_for("torch", None, half)
    monkeypatch.setattr(sys.modules[with_existing.__module__], "framework_group", group(2))
    assert resolve_for("torch", None, half).process_id == 1
    with pytest.raises(ClusterError, match="lacks RANK"):
        resolve_for("torch", "torchrun", half)
