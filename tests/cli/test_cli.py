"""What a person types: output, JSON, and exit statuses 0 (fine), 1 (a problem), 2 (wrong usage)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from perdure import CheckpointManager
from perdure.cli import main


def perdure(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recipe = {"replicas": 8, "engine": "jax"}
    with CheckpointManager(tmp_path / "run", recipe=recipe) as manager:
        for step in (10, 20):
            state: dict[str, Any] = {"w": np.full((3, 4), step, np.float32), "name": "digits"}
            manager.save(step, state)
    return tmp_path / "run"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def test_ls_lists_the_checkpoints(run: Path) -> None:
    result = perdure("ls", run)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["step", "created", "leaves", "size", "fingerprint"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20"]
    document = json.loads(perdure("ls", run, "--json").output)
    assert [row["step"] for row in document["checkpoints"]] == [10, 20]
    assert document["checkpoints"][1]["bytes"] == 3 * 4 * 4 + len("digits")


def test_ls_and_show_print_the_metrics(tmp_path: Path) -> None:
    many = {f"m{number}": float(number) for number in range(6)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1})
        manager.save(2, {"w": 2}, {"loss": 0.123456789, "accuracy": float("nan")})
        manager.save(3, {"w": 3}, many)
    lines = perdure("ls", tmp_path).output.splitlines()
    assert lines[0].split()[-1] == "metrics"
    assert lines[2].endswith("accuracy=not-finite loss=0.123457")
    assert lines[3].endswith("m0=0 m1=1 m2=2 m3=3 (and 2 more)")
    rows = json.loads(perdure("ls", tmp_path, "--json").output)["checkpoints"]
    assert [row["metrics"] for row in rows] == [{}, {"loss": 0.123456789, "accuracy": None}, many]
    shown = perdure("show", tmp_path, 2).output
    assert "metric       loss = 0.123456789" in shown
    assert "metric       accuracy = not finite" in shown
    assert "metric" not in perdure("show", tmp_path, 1).output
    assert json.loads(perdure("show", tmp_path, 3, "--json").output)["metrics"] == many


def test_ls_reports_a_damaged_manifest(run: Path) -> None:
    flip(run / "checkpoints" / "000000000010.json")
    result = perdure("ls", run)
    assert result.exit_code == 1
    assert "step 10 is damaged" in result.output
    document = json.loads(perdure("ls", run, "--json").stdout)
    assert [row["step"] for row in document["checkpoints"]] == [20]
    assert [row["step"] for row in document["damaged"]] == [10]


def test_show_gives_recipe_and_leaves_of_the_newest_or_of_a_step(run: Path) -> None:
    result = perdure("show", run)
    assert result.exit_code == 0
    assert "step         20" in result.output
    assert "replicas = 8" in result.output
    assert "float32[3,4]" in result.output
    assert "str digits" in result.output
    document = json.loads(perdure("show", run, 10, "--json").output)
    assert document["step"] == 10
    assert [leaf["path"] for leaf in document["leaves"]] == ["name", "w"]


def test_verify_says_what_is_damaged_and_what_a_restore_would_take(run: Path) -> None:
    result = perdure("verify", run)
    assert (result.exit_code, "2 checkpoints good, 0 damaged" in result.output) == (0, True)
    flip(sorted((run / "packs").iterdir())[1])
    result = perdure("verify", run)
    assert result.exit_code == 1
    assert "DAMAGED" in result.output
    assert "a restore takes step 10, the newest good one" in result.output
    document = json.loads(perdure("verify", run, "--json").output)
    assert (document["ok"], document["good"], document["bad"]) == (False, [10], [20])


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_path_that_is_no_run_is_wrong_usage(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        result = perdure(command, path)
        assert result.exit_code == 2
        assert "expected a run directory" in result.output
        assert "Traceback" not in result.output
        assert json.loads(perdure(command, path, "--json").stdout)["kind"] == "NotARunError"


def test_a_step_that_is_not_there_is_wrong_usage(run: Path) -> None:
    result = perdure("show", run, 15)
    assert result.exit_code == 2
    assert "expected a checkpoint of step 15, found steps 10, 20" in result.output


def test_a_newer_format_is_a_problem(run: Path) -> None:
    (run / "perdure.json").write_text('{"format":4,"created":"2030"}\n')
    result = perdure("verify", run)
    assert result.exit_code == 1
    assert "Install a newer perdure" in result.output


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["ls"], ["show", "x", "notanumber"], ["ls", "x", "-q"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert perdure(*arguments).exit_code == 2
