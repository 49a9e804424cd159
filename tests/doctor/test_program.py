"""`perdure doctor -- python train.py`: first steps of a program, computed twice and compared."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from perdure import CheckpointManager
from perdure.cli import main

PROGRAMS = Path(__file__).parent / "programs"
ENGINES = Path(__file__).parents[1] / "distribute"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run of 7 steps, which the program must not find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ENGINES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with CheckpointManager("runs/mine") as manager:
        manager.save(7, {"w": 1})
    return tmp_path


def files(home: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(home.rglob("*")) if p.is_file()}


def doctor(program: str, *arguments: str, options: tuple[str, ...] = ()) -> Result:
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments]
    return CliRunner().invoke(main, ["doctor", *options, "--", *command])


def differing(ended: Result) -> dict[str, list[dict[str, Any]]]:
    assert ended.stdout, ended.output
    rows = json.loads(ended.stdout)["comparisons"]
    return {row["what"]: row["deviations"] for row in rows if not row["is_equal"]}


def test_a_right_first_step_is_equal_on_all_devices_and_nothing_is_written(home: Path) -> None:
    before = files(home)
    ended = doctor("first_step", "nothing")
    assert ended.exit_code == 0, ended.output
    # Four replicas twice and on two other devices, their sum, and three updates twice: in two runs.
    assert "the first step       6       46       3          2  equal" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "equal"
    assert files(home) == before


def test_wrong_replicas_and_a_wrong_update_are_named_with_device_and_leaf() -> None:
    """A replica whether it was computed on its own device, which does that twice, or on another."""
    ended = doctor("first_step", "replica 1", "replica 2", "update")
    assert ended.exit_code == 1, ended.output
    lines = [line for line in ended.stdout.splitlines() if "other bits" in line]
    assert lines == [
        f"the first step: {what}: other bits in {times} of {times} results on 1, "
        f"process {process}: {leaf}"
        for what, times, leaf in (
            ("replica 1", 2, "contribution/g"),
            ("replica 2", 1, "contribution/g"),
            ("update", 2, "state/w"),
        )
        for process in (1, 2)
    ]


def test_numbers_without_a_seed_differ_between_the_runs_or_within_one() -> None:
    within = differing(doctor("first_step", "batch", options=("--json",)))
    assert set(within) == {*(f"replica {number}" for number in range(4)), *LATER}
    between = differing(doctor("first_step", "data", options=("--json",)))
    assert set(between) == set(within)
    # Each run agrees with itself, so that all that differs is of the second.
    assert {place["process"] for places in between.values() for place in places} == {2}


LATER = ("the sum of the replicas", "update")


def test_a_plain_loop_is_ended_after_two_equal_steps(home: Path) -> None:
    before = files(home)
    ended = doctor("plain_loop", "nothing_odd", options=("--json",))
    assert ended.exit_code == 0, ended.output
    rows = json.loads(ended.stdout)["comparisons"]
    assert [(row["group"], row["what"], row["results"]) for row in rows] == [
        ("states of runs/mine", "step 0", 2),  # the fresh state is none of the two
        ("states of runs/mine", "step 1", 2),
        ("states of runs/mine", "step 2", 2),
    ]
    assert files(home) == before


def test_a_plain_loop_that_differs_is_named_with_step_and_leaf() -> None:
    ended = doctor("plain_loop", "second")
    assert ended.exit_code == 1, ended.output
    lines = [line for line in ended.stdout.splitlines() if "other bits" in line]
    assert lines == [
        "states of runs/mine: step 2: other bits in 1 of 1 results, process 2: w",
    ]
    assert set(differing(doctor("plain_loop", "unseeded", options=("--json",)))) == {
        "step 1",
        "step 2",
    }


def test_without_a_manager_the_checkpoints_are_compared() -> None:
    ended = doctor("plain_loop", "checkpoints")
    assert ended.exit_code == 0, ended.output
    assert "checkpoints of runs/mine       1        2" in ended.stdout


def test_a_program_that_ends_early_is_equal_and_the_end_is_named() -> None:
    ended = doctor("plain_loop", "short", options=("--steps", "2"))
    assert ended.exit_code == 0, ended.output
    assert "the end: the program ended after 1 of the 2 steps that --steps asks for" in ended.stdout


def test_a_program_that_computes_nothing_known_or_fails_is_an_error() -> None:
    ended = doctor("plain_loop", "nothing")
    assert ended.exit_code == 1
    assert "nothing that it computed is known" in ended.output
    ended = doctor("plain_loop")
    assert ended.exit_code == 1
    assert "IndexError" in ended.output
    assert "heartbeat" not in ended.output
    ended = CliRunner().invoke(main, ["doctor", "--", "python", "none.py"])
    assert (ended.exit_code, "none.py: no such file" in ended.output) == (2, True)
