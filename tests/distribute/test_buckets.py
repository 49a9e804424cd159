"""A run under plain `DistributedDataParallel` is resumed with the same gradients, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from group import results


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all three processes report; of fewer every sum has one order."""
    directory = str(tmp_path_factory.mktemp("buckets"))
    first, *others = results("buckets_worker.py", 3, "--directory", directory, forked="torch")
    for other in others:
        assert {**other, "refused": ""} == {**first, "refused": ""}  # it names process 0
    return first


@pytest.mark.parametrize("kind", ["exact", "views", "unused"])
def test_the_first_step_after_a_resume_adds_in_the_order_of_an_uninterrupted_run(
    report: dict[str, Any], kind: str
) -> None:
    assert report[kind]


def test_it_does_not_if_the_buckets_change_after_that_step(report: dict[str, Any]) -> None:
    """The control: DDP without a manager that arranges its buckets."""
    assert not report["not arranged"]


def test_logical_replicas_may_come_after_the_restore(report: dict[str, Any]) -> None:
    assert report["logical replicas"]


def test_a_model_whose_buckets_only_a_step_arranges_is_refused(report: dict[str, Any]) -> None:
    assert "model: " in report["refused"]
    assert "static_graph" in report["refused"]
    assert "find_unused_parameters" in report["refused"]


def test_a_save_warns_of_a_model_that_was_not_arranged(report: dict[str, Any]) -> None:
    assert any("model: " in text and "restore_or_initialize" in text for text in report["warned"])
