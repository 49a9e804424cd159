"""The gradients of logical replicas have the same bits on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
from group import results


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each process reports, for groups of 1, 2, 3 and 4. Those of 2 and 3 share a run."""
    directory = str(tmp_path_factory.mktemp("replicas") / "run")
    return {
        count: results(
            "logical_replicas_worker.py",
            count,
            *("--errors", str(int(count == 2))),
            *("--directory", directory if count in (2, 3) else ""),
            forked="torch",
        )
        for count in (1, 2, 3, 4)
    }


def test_the_bits_do_not_depend_on_the_number_of_processes(
    reports: dict[int, list[dict[str, Any]]],
) -> None:
    """With new gradients in each step, and with zeroed ones that are views of the buckets."""
    bits = {text for group in reports.values() for report in group for text in report["bits"]}
    assert len(bits) == 1


def test_fsdp_has_the_bits_of_ddp(reports: dict[int, list[dict[str, Any]]]) -> None:
    """Without a clipped norm, which FSDP2 adds over the shards."""
    bits = {
        report[name] for group in reports.values() for report in group for name in ("ddp", "fsdp")
    }
    assert len(bits) == 1


def test_a_zero_keeps_no_sign_that_depends_on_the_number_of_processes(
    reports: dict[int, list[dict[str, Any]]],
) -> None:
    """A parameter has the gradient -0.0 in every replica. In four processes nothing is added to it."""
    few = [report["few"] for count in (1, 2, 4) for report in reports[count]]
    assert len({text for texts in few for text in texts}) == 1


def test_several_loops_accumulate_their_means(reports: dict[int, list[dict[str, Any]]]) -> None:
    """Under DDP with gradients of its own or views of the buckets, and under FSDP2.

    The last one also accumulates two batches within each replica.
    """
    bits = {tuple(report["accumulated"]) for group in reports.values() for report in group}
    assert len(bits) == 1
    [(ddp, views, fsdp, within)] = bits
    assert ddp == views == fsdp != within


def test_the_number_of_processes_may_change_in_the_middle(
    reports: dict[int, list[dict[str, Any]]],
) -> None:
    """Two processes computed the first step, and three the second one."""
    assert {report["continued"] for report in reports[3]} == {reports[1][0]["ddp"]}
    assert reports[2][0]["continued"] != reports[1][0]["ddp"]


def test_plain_ddp_depends_on_it(reports: dict[int, list[dict[str, Any]]]) -> None:
    """The negative control: the same replicas, accumulated by autograd and added by all-reduce."""
    assert len({group[0]["plain"] for group in reports.values()}) > 1


def test_a_loop_that_is_not_one_backward_for_each_replica_is_an_error(
    reports: dict[int, list[dict[str, Any]]],
) -> None:
    for process, report in enumerate(reports[2]):
        errors = report["errors"]
        assert "inside of `for replica in replicas`" in errors["outside"]
        assert f"one backward() for replica {6 * process}" in errors["without_backward"]
        found = f"one backward() for replica {6 * process}, found a second one"
        assert found in errors["twice"]
        assert errors["twice"].startswith("StateError")
        assert "without a communication hook" in errors["hook"]
        assert f"a loop that was left at replica {6 * process}" in errors["left"]
        assert "multiple of the 2 processes" in errors["multiple"]
        assert "find_unused_parameters" in errors["unused"]
        assert "one mesh of one dimension, found dead with " in errors["two_dimensions"]
        assert "found a Net" in errors["neither"]
