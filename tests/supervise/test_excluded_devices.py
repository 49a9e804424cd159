"""`--on-corruption exclude`: the run goes on without a device that an audit found to be wrong.

The workers report as an audit does; tests/distribute/test_audit.py shows that an audit reports so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from supervised import Run, cli

from perdure.supervise.attempts_log import FILE
from perdure.supervise.worker_environment import device_variables

# REPORTS: {attempt: (rank of the worker, its local devices that are wrong, devices in use)}
PROGRAM = """
import json, os, time
from pathlib import Path
from perdure import heartbeat
from perdure.runtime.excluded_devices import excluded_devices, report_corruption
attempt, rank = int(os.environ["PERDURE_ATTEMPT"]), int(os.environ["RANK"])
told = [rank, int(os.environ["WORLD_SIZE"]), sorted(excluded_devices())]
Path(f"told-{attempt}-{rank}").write_text(json.dumps(told))
heartbeat(attempt)
heartbeat(attempt + 1)
wrong, devices, count = REPORTS.get(attempt, (None, None, None))
while wrong is not None and len(list(Path().glob(f"told-{attempt}-*"))) < told[1]:
    pass
if wrong == rank:
    assert report_corruption(devices, count, f"step {attempt}: wrong numbers")
    Path(f"reported-{attempt}").touch()
if wrong is not None:
    while not Path(f"reported-{attempt}").exists():
        pass
    raise SystemExit(1)
"""


def run(reports: dict[int, Any], **options: Any) -> Run:
    return Run(PROGRAM.replace("REPORTS", repr(reports)), **options)


def told(attempt: int) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(Path().glob(f"told-{attempt}-*"))]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_worker_loses_a_device_and_then_its_last_one() -> None:
    done = run({1: (1, [2], 3), 2: (1, [1], 2), 3: (1, [0], 1)}, workers=2)
    assert done.summary.status == 0
    assert told(1) == [[0, 2, []], [1, 2, []]]
    assert told(2) == [[0, 2, []], [1, 2, [2]]]
    assert told(3) == [[0, 2, []], [1, 2, [1, 2]]]
    assert told(4) == [[0, 1, []]]
    kinds = [(a.kind, a.corrupt_devices, a.devices_left) for a in done.summary.attempts]
    assert kinds == [
        ("corrupt", (2,), 2), ("corrupt", (1,), 1), ("corrupt", (0,), 0), ("done", (), None)
    ]  # fmt: skip
    output = done.err.getvalue()
    assert "the worker in place 1 continues without its device 2" in output
    assert "continuing without the worker in place 1: it has no other device" in output
    assert "worker 1: step 1: wrong numbers" in output
    lines = (Path("logs") / FILE).read_text().splitlines()
    assert '"corrupt_devices":[2]' in "".join(lines).replace(" ", "")


def test_without_a_device_the_run_ends() -> None:
    done = run({1: (0, [0], 1)})
    assert done.summary.status == 1
    assert "no device is left (worker 0: step 1: wrong numbers)" in done.summary.reason
    assert len(done.summary.attempts) == 1


def test_restarts_are_counted() -> None:
    done = run({1: (0, [0], 4), 2: (0, [0], 3)}, max_restarts=1)
    assert done.summary.status == 1
    assert told(2) == [[0, 1, [0]]]
    assert "2 failures, and 1 restart is allowed" in done.summary.reason


def test_devices_that_the_environment_excludes_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_EXCLUDED_DEVICES", "0")
    done = run({1: (0, [1], 3)})
    assert done.summary.status == 0
    assert told(1) == [[0, 1, [0]]]
    assert told(2) == [[0, 1, [0, 2]]]  # number 1 of those that are left


def test_the_options_reach_the_program() -> None:
    code = "import os; print(os.environ['PERDURE_AUDIT'], os.environ['PERDURE_ON_CORRUPTION'])"
    out, _ = cli("--audit", "0.25", "--on-corruption", "exclude", code=code).communicate()
    assert "0.25 exclude" in out


@pytest.mark.parametrize(
    ("gpus", "places", "visible"),
    [
        ("4,5,6", [0, 1, 2], None),
        ("4,5,6", [1, 2], "5,6"),
        ("4,5", [1, 2], None),  # not one GPU for each place
        ("", [1, 2], None),
    ],
)
def test_the_gpus_of_places_without_a_worker_are_hidden(
    gpus: str, places: list[int], visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert device_variables(1, None, places, 3).get("CUDA_VISIBLE_DEVICES") == visible
