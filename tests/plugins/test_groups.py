"""Two processes under torchrun in each host, killed and resumed; `make proof-doors` has the hosts."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if not all(map(importlib.util.find_spec, ("transformers", "accelerate", "lightning"))):
    pytest.skip("the hosts are not installed; make proof-doors has them", allow_module_level=True)
WORKER = Path(__file__).with_name("group_worker.py")
TITAN = Path(__file__).with_name("titan_worker.py")
ROWS = [
    ("transformers", "ddp"),
    ("transformers", "fsdp"),
    ("accelerate", "ddp"),
    ("accelerate", "ddp_split"),
    ("accelerate", "ddp_dispatch"),
    ("accelerate", "fsdp"),
    ("lightning", "ddp"),
    ("lightning", "fsdp"),
    ("lightning", "2d"),
    ("lightning", "ddp_val"),
    ("lightning", "ddp_nodes"),
    ("fabric", "ddp"),
    ("fabric", "fsdp"),
    ("torchtitan", "fsdp"),
    ("torchtitan", "2d"),
    ("transformers", "ddp_noise"),
    ("transformers", "ddp_noise_workers"),
    ("transformers", "ddp_length"),
    ("transformers", "ddp_eval"),
    ("accelerate", "ddp_noise"),
    ("accelerate", "ddp_noise_workers"),
    ("accelerate", "ddp_noise_dispatch"),
    ("lightning", "ddp_noise"),
    ("transformers", "ddp_held"),
    ("accelerate", "ddp_held"),
    ("lightning", "ddp_held"),
    ("lightning", "ddp_stream"),
]


def interruptions() -> list[Any]:
    """Each row with a SIGTERM, and a SIGKILL at five steps that a seed has chosen."""
    source = random.Random(0)
    kinds = {row: ["terminated"] for row in ROWS}
    for row in ROWS:
        kinds[row] += [f"killed{step}" for step in sorted(source.sample(range(3, 9), 5))]
    return [(*row, kind) for row in ROWS for kind in kinds[row]]


def run(host: str, how: str, directory: Path, count: int = 0) -> tuple[int, list[Any], str]:
    """Exit status of torchrun, the answers of the processes, standard error."""
    count = count or (4 if how.startswith("2d") else 2)
    program = [TITAN] if host == "torchtitan" else [WORKER, host]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    machines = [["--standalone", f"--nproc-per-node={count}"]]
    if "nodes" in how:  # one process on each of two machines
        address = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        port = f"--master-port={free_port()}"
        machines = [[*address, port, f"--node-rank={rank}"] for rank in range(2)]
    started = [
        subprocess.Popen(
            [*launcher, *options, *map(str, program), how, str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for options in machines
    ]
    with ThreadPoolExecutor() as pool:  # both pipes are read at once
        errors = [*pool.map(lambda each: each.communicate(timeout=300)[1], started)]
    answers = [Path(f"{directory}-{rank}.json") for rank in range(count)]
    status = max(abs(each.returncode) for each in started)
    return status, [json.loads(a.read_text()) for a in answers if a.exists()], "".join(errors)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The end of the undisturbed run of a host, trained once."""

    @cache
    def ended(host: str, how: str) -> list[Any]:
        status, answers, err = run(host, how, tmp_path_factory.mktemp("whole") / "run")
        assert status == 0, err
        return answers

    return ended


@pytest.mark.parametrize(("host", "how", "interruption"), interruptions())
def test_two_processes_resume_to_the_same_bits(
    host: str, how: str, interruption: str, whole: Any, tmp_path: Path
) -> None:
    status, answers, err = run(host, f"{how}-{interruption}", tmp_path / "run")
    assert status != 0, err
    assert answers == []
    assert list((tmp_path / "run").iterdir())
    status, answers, err = run(host, how, tmp_path / "run")
    assert status == 0, err
    for resumed, undisturbed in zip(answers, whole(host, how), strict=True):
        assert resumed["bits"] == undisturbed["bits"]
        assert resumed.get("tokens") == undisturbed.get("tokens")
        count = len(resumed["seen"])
        assert 0 < count < len(undisturbed["seen"])
        assert resumed["seen"] == undisturbed["seen"][-count:]


@pytest.mark.parametrize("host", ["transformers", "accelerate", "lightning"])
def test_three_processes_resume_to_the_same_bits(host: str, tmp_path: Path) -> None:
    """Two numbers have one sum, three have several."""
    status, undisturbed, err = run(host, "ddp", tmp_path / "whole", 3)
    assert status == 0, err
    status, _, err = run(host, "ddp-killed4", tmp_path / "run", 3)
    assert status != 0, err
    status, resumed, err = run(host, "ddp", tmp_path / "run", 3)
    assert status == 0, err
    assert [each["bits"] for each in resumed] == [each["bits"] for each in undisturbed]
    assert len(resumed[0]["seen"]) < len(undisturbed[0]["seen"])


def test_a_parameter_that_each_process_would_train_alone_is_refused(tmp_path: Path) -> None:
    status, answers, err = run("lightning", "ddp_frozen", tmp_path / "run")
    assert status != 0
    assert answers == []
    assert "model.inner.weight is trained now and was frozen when DDP wrapped the module" in err
    assert not [*(tmp_path / "run").glob("**/checkpoints/*.json")]


@pytest.mark.parametrize("host", ["transformers", "accelerate", "lightning"])
def test_another_number_of_processes_is_refused(host: str, tmp_path: Path) -> None:
    assert run(host, "ddp-killed", tmp_path / "run")[0] != 0
    status, answers, err = run(host, "ddp", tmp_path / "run", count=1)
    assert status != 0
    assert answers == []
    assert "processes" in err
    assert "Start as many again" in err or "RecipeMismatchError" in err
