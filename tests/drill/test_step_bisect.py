"""`perdure bisect RUN1 RUN2 -- COMMAND`: the step at which two runs part, replayed part by part."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure.cli import main
from perdure.drill.causes import CAUSES
from perdure.drill.replay import Parts
from perdure.drill.step_bisect import PARTS, first_different_part, generators_that_differ

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = [sys.executable, str(PROGRAMS / "journaled.py")]
REPLICAS = [sys.executable, str(PROGRAMS / "replicas.py")]


SMALLER, LARGER = [*PROGRAM, "run=smaller"], [*PROGRAM, "run=larger", "rate=0.2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two runs of programs that differ from step 10 on, each with every third line."""
    home = tmp_path_factory.mktemp("home")
    for command in (SMALLER, LARGER):
        make(home, [*command, "every=3"])
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def make(home: Path, *commands: list[str], devices: int = 1) -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    for command in commands:
        subprocess.run(command, cwd=home, env=environment, check=True)


def bisected(one: str, two: str, *options: str, command: list[str]) -> dict[str, Any]:
    """The document of a bisect of two runs that part."""
    arguments = ["bisect", f"runs/{one}", f"runs/{two}", *options, "--json", "--", *command]
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 1, ended.output
    return json.loads(ended.stdout)


def test_the_step_is_found_between_two_lines_of_the_journal() -> None:
    options = ["--command2", shlex.join(LARGER), "--", *SMALLER]
    ended = CliRunner().invoke(main, ["bisect", "runs/smaller", "runs/larger", *options])
    assert ended.exit_code == 1, ended.output
    assert "they part at step 12, after step 9, which is equal (journals)" in ended.output
    assert "the replays part at step 10: the state after the step\n    w: " in ended.output
    assert f"likely cause: {CAUSES['other step'][0]}" in ended.output
    assert "wrong: " not in ended.output


def test_a_run_that_its_program_does_not_compute_is_named(home: Path) -> None:
    found = bisected("larger", "smaller", command=LARGER)["replay"]
    assert found["part"] is None
    assert found["wrong"] == [str(home / "runs" / "smaller")]
    assert found["diagnosis"]["cause"] == "computed wrongly"


def test_the_logical_replica_and_the_leaf_are_named(home: Path) -> None:
    one, two = [*REPLICAS, "run=one"], [*REPLICAS, "run=two", "replica=yes"]
    make(home, one, two)
    found = bisected("one", "two", "--command2", shlex.join(two), "--devices", "2", command=one)
    assert (found["step"], found["what"]) == (7, "total")
    replay = found["replay"]
    assert (replay["step"], replay["wrong"]) == (7, [])
    part = replay["part"]
    assert (part["part"], part["numbers"], part["of"]) == ("contribution", [3], 6)
    assert [leaf["path"] for leaf in part["leaves"]] == ["g"]
    assert part["equal"] == ["before", "batch", "key"]
    assert replay["diagnosis"]["cause"] == "other gradient"
    assert [run["result"]["verdict"] for run in replay["runs"]] == ["reproduced"] * 2


def test_the_topology_is_the_cause_if_the_difference_is_gone_on_another(home: Path) -> None:
    one = [*REPLICAS, "run=on-1", "by=devices"]
    make(home, one)
    make(home, [*REPLICAS, "run=on-3", "by=devices"], devices=3)
    found = bisected("on-1", "on-3", command=one)["replay"]
    assert [run["devices"] for run in found["runs"]] == [1, 3]
    assert (found["part"]["part"], found["part"]["numbers"]) == ("contribution", [*range(6)])
    assert (found["wrong"], found["diagnosis"]["cause"]) == ([], "topology")


def test_no_run_is_called_wrong_if_its_replays_differ() -> None:
    found = bisected("smaller", "larger", command=[*SMALLER, "clock=yes"])["replay"]
    assert (found["wrong"], found["diagnosis"]["cause"]) == ([], "not repeatable")


def test_a_run_of_another_recipe_asks_for_its_command(home: Path) -> None:
    make(home, [*PROGRAM, "run=seed", "seed=1"])
    found = bisected("smaller", "seed", command=SMALLER)["replay"]
    assert (found["wrong"], found["diagnosis"]["cause"]) == ([], "other program")


def test_mistakes_in_the_arguments_exit_with_2() -> None:
    runs = ["runs/smaller", "runs/larger"]
    for arguments, phrase in (
        (["--workers", "2"], "-- COMMAND"),
        (["--command2", "python 'x", "--", *SMALLER], "No closing quotation"),
        (["--command2", "", "--", *SMALLER], "found nothing"),
        (["--", "no-such-program"], "no-such-program"),
    ):
        ended = CliRunner().invoke(main, ["bisect", *runs, *arguments])
        assert ended.exit_code != 0
        assert phrase in ended.output + str(ended.exception), arguments


def step(**other: dict[str, str]) -> Parts:
    """The parts of a step of two replicas, some of them with other leaves."""
    parts: dict[tuple[str, int | None], dict[str, str]] = {}
    for name in PARTS:
        for number in (0, 1) if name in ("batch", "key", "contribution") else (None,):
            parts[name, number] = {"a": "1", "b": "1"}
    for key, leaves in other.items():
        name, _, number = key.partition("_")
        parts[name, int(number) if number else None] = leaves
    return parts


def test_the_first_part_is_that_of_the_computation_and_not_of_the_alphabet() -> None:
    changed = {"a": "1", "b": "2"}
    assert first_different_part(step(), step()) is None
    found = first_different_part(step(), step(state=changed, contribution_1=changed))
    assert found is not None
    assert found.name == "the contribution of logical replica 1"
    assert [leaf.path for leaf in found.leaves] == ["b"]
    found = first_different_part(step(), step(key_0=changed, key_1=changed, batch_1=changed))
    assert found is not None
    assert found.name == "the batch of logical replica 1"
    everywhere = first_different_part(step(), step(key_0=changed, key_1=changed))
    assert everywhere is not None
    assert everywhere.name == "the random key of every logical replica"


def test_generators_count_where_both_draw_and_no_strategy_has_keys() -> None:
    drawn: Parts = {("generators", 0): {"numpy": "1"}}
    other: Parts = {("generators", 0): {"numpy": "2"}}
    found = first_different_part(drawn, other)
    assert found is not None
    assert found.part == "generators"
    assert first_different_part(drawn, {("generators", 0): {"python": "2"}}) is None
    assert first_different_part({**step(), **drawn}, {**step(), **other}) is None
    assert generators_that_differ({**step(), **drawn}, {**step(), **other}) == ("numpy",)


def test_only_the_traced_step_leaves_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.data import ArrayDataset
    from perdure.jax import OneDeviceStrategy

    parts_traced: list[tuple[str, int | None]] = []

    class Hook:
        is_doctor, traced, finished = False, 4, -2

        def trace(self, part: str, number: int | None, digests: Any) -> None:
            parts_traced.append((part, number))

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"w": (state["w"] * batch["x"]).sum()}

    def update(state: Any, total: Any) -> Any:
        return {"w": state["w"] - 0.1 * total["w"]}, {}

    strategy = OneDeviceStrategy(replicas=2)
    data = ArrayDataset({"x": np.ones(8, np.float32)}, 8, shuffle=False)
    monkeypatch.setattr("perdure.checkpoint.journal.drill_hook", Hook)
    step, state = strategy.step(grad, update), {"w": np.float32(1)}
    fast = []
    for number in (2, 3, 4):
        state, _ = step(state, strategy.batch(data, number))
        fast.append(strategy.explain(step).partition(":")[0])
    assert fast == ["Fast", "Not fast", "Fast"]
    parts = [(part, r) for r in range(2) for part in ("batch", "key", "contribution")]
    assert parts_traced == [("before", None), *parts, ("total", None), ("update", None)]
