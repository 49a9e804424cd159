"""`perdure run --multi-node`: the workers of several machines are one group, described alike to all."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from perdure import supervise
from perdure.cli.main import main
from perdure.distribute import resolve
from perdure.errors import LaunchError
from perdure.supervise import Nodes, RunOptions
from perdure.supervise.worker_environment import worker_variables

NODES = [Nodes(3, index, "[fd00::1]:2222") for index in range(3)]


def test_the_workers_of_all_machines_are_one_group() -> None:
    variables = [worker_variables(index, 2, [], node) for node in NODES for index in range(2)]
    for source in ("jax", "torchrun"):
        clusters = [resolve(source, own) for own in variables]
        assert [(c.process_id, c.num_processes) for c in clusters] == [(n, 6) for n in range(6)]
        assert {c.coordinator for c in clusters} == {"[fd00::1]:2222"}
    assert [resolve(environ=own).process_id for own in variables] == list(range(6))
    assert [own["LOCAL_RANK"] for own in variables] == ["0", "1"] * 3
    assert {own["LOCAL_WORLD_SIZE"] for own in variables} == {"2"}


def test_a_machine_alone_describes_another_group() -> None:
    """Control: without `nodes` each machine would take itself for all."""
    assert worker_variables(1, 2, [1, 2, 3, 4])["WORLD_SIZE"] == "2"


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LaunchError, match="expected a number from 0 to 1, found 2"):
        Nodes(2, 2, "a:1")
    with pytest.raises(LaunchError, match="cannot change on several machines"):
        RunOptions(workers=2, elastic=(1, 2), nodes=NODES[0])


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """The options of the supervisors that the command line makes; none is started."""
    made: list[RunOptions] = []

    class Played:
        def __init__(self, command: Any, options: RunOptions, **_: Any) -> None:
            made.append(options)

        def run(self) -> Any:
            return supervise.RunHistory(end={"status": 0})

    monkeypatch.setattr("perdure.supervise.supervisor.Supervisor", Played)
    return made


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "node1", "MASTER_PORT": "99", "RANK": "1", "WORLD_SIZE": "2"},
        {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "node[1-2]",
            "JAX_COORDINATOR_PORT": "99",
        },
    ],
)
def test_the_command_line_finds_the_machines(
    options: list[RunOptions], environ: dict[str, str]
) -> None:
    arguments = ["run", "--workers", "4", "--multi-node", "--", "true"]
    done = CliRunner().invoke(main, arguments, env=environ)
    assert done.exit_code == 0, done.output
    assert options[0].nodes == Nodes(2, 1, "node1:99")
    assert CliRunner().invoke(main, ["run", "--", "true"], env=environ).exit_code == 0
    assert options[1].nodes is None, "only when it is asked for"


def test_a_machine_that_is_alone_is_an_error(options: list[RunOptions]) -> None:
    done = CliRunner().invoke(main, ["run", "--multi-node", "--", "true"])
    assert done.exit_code == 2
    assert "expected a description of the machines in the environment, found none" in done.output
    assert options == []
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    job = {**slurm, "SLURM_STEP_NODELIST": "node1"}
    done = CliRunner().invoke(main, ["run", "--multi-node", "--", "true"], env=job)
    assert (done.exit_code, options[0].nodes) == (0, None), "a job of one machine"
