"""The main job, and its negative controls: with any one guard taken out the demo must FAIL."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure import CheckpointManager
from perdure.cli import main
from perdure.demo import SAVE_EVERY
from perdure.demo.digits import load_digits
from perdure.demo.driver import ENDS, DemoOptions, GroupEnd, plan, run_group
from perdure.demo.driver import _steps as steps_of
from perdure.errors import ClusterError
from perdure.store import Run
from perdure.supervise.worker import LINE_BYTES, Worker

EPOCHS = "2"


def demo(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "demo", "--json", "--epochs", EPOCHS, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


# The phases share what they compile: that programs which each process compiles for itself give the same
# bits is shown by distribute/test_jax_invariance.py, for this network among others. The demo on PyTorch
# is in `make proof-foundation`; distribute/test_torchrun.py kills a group of PyTorch, too.
def test_a_run_that_is_killed_and_moved_ends_with_the_same_bits(
    tmp_path: Path, compiled: dict[str, str]
) -> None:
    status, result = demo("--seed", "11", "--directory", str(tmp_path), environment=compiled)
    assert status == 0, result
    assert result["pass"]
    plain, started, resumed, finished = result["phases"]
    assert plain["fingerprint"] == finished["fingerprint"] == result["fingerprints"][0]
    assert (started["ended"], resumed["ended"], finished["ended"]) == (
        "SIGKILL",
        "exit 75",
        "exit 0",
    )
    assert started["topology"] == "4 devices"
    assert resumed["topology"] == "2 processes"
    assert resumed["resumed_from"] == resumed["from"] < started["to"]
    assert resumed["repeated"] == started["to"] - resumed["from"] > 0
    assert finished["resumed_from"] == resumed["to"]
    assert result["accuracy"][0] == result["accuracy"][1] > 0.5
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "faulted"}
    losses = {}
    for name in ("plain", "faulted"):
        manifests = Run(tmp_path / name).contents().manifests
        losses[name] = {step: manifest.metrics["loss"] for step, manifest in manifests.items()}
    assert losses["plain"][result["steps"]] == losses["faulted"][result["steps"]] > 0


# `make proof-foundation` takes each guard out on both engines; that an all-reduce in place of the tree
# gives other bits on PyTorch is shown by distribute/test_torch_invariance.py, too.
def test_without_the_position_the_bits_differ(
    monkeypatch: pytest.MonkeyPatch, compiled: dict[str, str]
) -> None:
    """The phase on two processes is left out: one resume is enough for a position that is lost."""
    for name, value in compiled.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "perdure.demo.driver.plan",
        lambda *recipe: [phase for phase in plan(*recipe) if phase.processes == 1],
    )
    arguments = ["--seed", "11", "--without", "position"]
    done = CliRunner().invoke(main, ["demo", "--json", "--epochs", EPOCHS, *arguments])
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert "error" not in result, result
    assert [phase["ended"] for phase in result["phases"]] == ["exit 0", "SIGKILL", "exit 0"]
    assert result["phases"][2]["from"] > 0
    assert not result["pass"]
    assert result["fingerprints"][0] != result["fingerprints"][1]
    assert None not in result["fingerprints"]


def test_a_directory_that_is_not_a_run_yet_has_no_steps(tmp_path: Path) -> None:
    # The driver looks for the first checkpoint while the first save makes the run.
    assert steps_of(tmp_path / "absent") == []
    assert steps_of(tmp_path) == []
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, {"x": np.zeros(2)})
    assert steps_of(tmp_path / "run") == [3]


SAYS = """
import json, os, sys
print("not json")
config = json.loads(os.environ.get("TF_CONFIG", "null"))
print("half a line {of", end="", file=sys.stderr, flush=True)
print(json.dumps({"event": "env", "config": config, "long": "x" * LENGTH}), flush=True)
print("a complaint", file=sys.stderr, flush=True)
sys.exit(int(sys.argv[1]))
"""
WAITS = """
import json, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(json.dumps({"event": "ready"}), flush=True)
signal.pause()
"""


def test_the_processes_of_a_group_get_a_cluster_and_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event may be longer than what is kept of a line, and follow text without an end of line."""
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {}}))
    for processes in (1, 2):
        events: dict[int, dict[str, Any]] = {}
        program = SAYS.replace("LENGTH", str(2 * LINE_BYTES))
        ended = run_group(
            [sys.executable, "-c", program, "0"],
            processes,
            on_event=lambda worker, event, _, events=events: events.update({worker: event}),
        )
        assert ended.statuses == (0,) * processes
        assert "a complaint" in ended.logs[-1]
        assert {len(event["long"]) for event in events.values()} == {2 * LINE_BYTES}
        configs = [events[worker]["config"] for worker in range(processes)]
        if processes == 1:
            assert configs == [None]
        else:
            assert configs[0]["cluster"] == configs[1]["cluster"]
            assert [config["task"]["index"] for config in configs] == [0, 1]


def test_an_unexpected_end_shows_the_log() -> None:
    ended = run_group([sys.executable, "-c", SAYS.replace("LENGTH", "1"), "3"])
    with pytest.raises(ClusterError, match=r"worker 0 of 1 ended with 3, expected 0 or 75") as said:
        ended.require((0, 75))
    assert "a complaint" in str(said.value)
    with pytest.raises(ClusterError, match="worker 1 of 2 ended with 3") as said:
        GroupEnd((-9, 3), ("of the one that was killed", "the cause")).require(ENDS["SIGTERM"])
    assert "the cause" in str(said.value)
    for statuses in ((-9, -9), (-9, 1)):  # one may see that the other is lost
        GroupEnd(statuses, ("", "")).require(ENDS["SIGKILL"])


@pytest.mark.parametrize(("number", "status", "text"), [(9, -9, "SIGKILL"), (15, 75, "exit 75")])
def test_signals_reach_every_process_of_a_group(number: int, status: int, text: str) -> None:
    """Nothing is started again after them, and none is left."""
    ready: set[int] = set()
    group: list[Worker] = []

    def on_event(worker: int, _: Any, workers: Sequence[Worker]) -> None:
        ready.add(worker)
        group[:] = workers
        for each in workers if len(ready) == 3 else ():
            each.send(number)

    ended = run_group([sys.executable, "-c", WAITS], 3, on_event=on_event)
    assert ended.statuses == (status,) * 3
    assert ended.describe() == text
    assert len(group) == 3
    for each in group:
        with pytest.raises(ProcessLookupError):
            os.kill(each.pid, 0)


def test_the_status_that_tells_most_is_reported() -> None:
    for statuses, status in (((0, 75), 75), ((75, 1), 1), ((0, -9, 1), -9), ((0, 0), 0)):
        assert GroupEnd(statuses, ()).status == status


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_faults_hit_in_the_middle_of_an_epoch_and_between_saves(engine: str) -> None:
    seen = set()
    for seed in range(200):
        for phase in plan(engine, 72, 12, seed):
            if phase.fault:
                seen.add((phase.fault, phase.stop))
                assert phase.stop % SAVE_EVERY in (1, 2)
                assert 0 < phase.stop % 12 < 10
    assert len(seen) > 10
    assert plan(engine, 72, 12, 5) == plan(engine, 72, 12, 5)


def test_the_shipped_digits_have_the_form_of_mnist() -> None:
    digits = load_digits()
    assert digits.train["image"].shape == (1437, 28, 28, 1)
    assert digits.test["image"].shape == (360, 28, 28, 1)
    assert digits.train["image"].dtype == np.float32
    assert 0 == digits.train["image"].min() < digits.train["image"].max() == 1


def test_the_workers_read_the_shipped_digits_from_one_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each of them would import scikit-learn, which takes seconds."""
    given = []

    def run(options: DemoOptions, examples: int, _: Any) -> dict[str, Any]:
        assert options.data is not None
        given.append(load_digits(options.data))
        assert len(given[0].train["label"]) == examples
        return {"pass": True}

    monkeypatch.setattr("perdure.demo.driver.run_demo", run)
    done = CliRunner().invoke(main, ["demo", "--json"])
    assert done.exit_code == 0, done.output
    for part, shipped in zip(given[0], load_digits(), strict=True):
        for name, values in shipped.items():
            np.testing.assert_array_equal(part[name], values, strict=True)


def test_a_data_path_that_is_not_mnist_is_refused_before_training(tmp_path: Path) -> None:
    wrong = tmp_path / "train-images-idx3-ubyte.gz"
    wrong.write_bytes(gzip.compress(b"<html>not found</html>"))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b""))
    status, result = demo("--data", str(tmp_path))
    assert status == 1, result
    assert result["kind"] == "DataError"
    assert "wrong magic number" in result["error"]
    assert wrong.name in result["error"]


def test_wrong_usage_has_status_2() -> None:
    command = [sys.executable, "-m", "perdure.cli", "demo", "--engine", "tensorflow"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'tensorflow' is not one of 'jax', 'torch'" in done.stderr
