"""PyTorch: one digest on any processes, and controls that show that it could differ."""

from __future__ import annotations

from typing import Any

import group
import pytest

PROCESSES = (1, 2, 3)


@pytest.fixture(scope="module")
def groups() -> Any:
    """Results of one and two interpreters of their own, and of three forks of one process."""
    return {
        count: group.results("torch_worker.py", count, forked="torch" if count > 2 else None)
        for count in PROCESSES
    }


@pytest.mark.parametrize("model", ["cnn", "batchnorm", "reduce", "recipe"])
@pytest.mark.parametrize("count", PROCESSES)
def test_any_number_of_processes_has_the_digest_of_one(groups: Any, count: int, model: str) -> None:
    expected = groups[1][0][model]
    assert [process[model] for process in groups[count]] == [expected] * count


@pytest.fixture(scope="module")
def threads() -> Any:
    """Results by (processes, devices of each)."""
    return {
        (processes, devices): group.results(
            "torch_worker.py", processes, "--devices", str(devices), forked="torch"
        )
        for processes, devices in ((1, 3), (2, 2))
    }


@pytest.mark.parametrize("model", ["cnn", "batchnorm", "reduce", "recipe"])
def test_several_devices_in_a_process_have_the_digest_of_one(
    groups: Any, threads: Any, model: str
) -> None:
    digests = [process[model] for results in threads.values() for process in results]
    assert digests == [groups[1][0][model]] * 3


def test_different_models_have_different_digests(groups: Any) -> None:
    assert groups[1][0]["cnn"] != groups[1][0]["batchnorm"]


@pytest.mark.parametrize("count", PROCESSES)
def test_processes_agree(groups: Any, count: int) -> None:
    everyone = [str(process) for process in range(count)]
    for process in groups[count]:
        assert process["agree"] == [count > 1, "from 0", everyone]


@pytest.mark.parametrize("control", ["all_reduce", "rng by process", "strided rows"])
def test_negative_controls_depend_on_the_topology(groups: Any, control: str) -> None:
    digests = {groups[count][0]["controls"][control] for count in PROCESSES}
    assert len(digests) == len(PROCESSES)


@pytest.mark.parametrize("control", ["rng by process", "strided rows"])
def test_negative_controls_on_one_process_are_the_real_thing(groups: Any, control: str) -> None:
    assert groups[1][0]["controls"][control] == groups[1][0]["cnn"]


def test_a_lost_worker_is_reported_and_nothing_hangs() -> None:
    survivor, victim = group.launch("torch_worker.py", 2, "--die-at", "3", forked="torch")
    assert victim[0] == -9, "the fault did not fire"
    assert survivor[0] == 0, survivor[2][-4000:]
    assert "Save nothing" in survivor[1]["lost"]
    assert "restart the whole group from the last checkpoint" in survivor[1]["lost"]
