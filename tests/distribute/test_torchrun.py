"""Under torchrun: a script that ends in order ends quietly, and an error ends all workers at once."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest
import torch.distributed.run

from forked import TOPOLOGY, run_forked
from perdure import EXIT_PREEMPTED
from perdure.store import Run

WORKER = Path(__file__).parent / "torchrun_worker.py"
TORCHRUN = Path(torch.distributed.run.__file__)


def forked(program: Path, arguments: list[str]) -> tuple[int, str]:
    """The exit status and standard error of a fork of a process with PyTorch."""
    environment = {name: text for name, text in os.environ.items() if name not in TOPOLOGY}
    [(status, _, said)] = run_forked("torch", program, [arguments], [environment])
    return status, said


def torchrun(directory: Path, *arguments: str, restarts: int = 0) -> tuple[int, str]:
    """The exit status, and standard error of torchrun and its two workers."""
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    options += [str(WORKER), "--directory", str(directory), *arguments]
    return forked(TORCHRUN, options)


def test_a_preempted_worker_is_restarted_and_all_end_quietly(tmp_path: Path) -> None:
    """Status 75 counts as a failure for torchrun, which starts the group again."""
    # One process has the same bits: all workers have one batch, and (g + g) / 2 is g.
    status, said = forked(WORKER, ["--directory", str(tmp_path / "undisturbed")])
    assert status == 0, said
    status, said = torchrun(tmp_path / "run", "--how", "term", restarts=1)
    assert status == 0, said
    assert f"exitcode: {EXIT_PREEMPTED}" in said
    assert "Traceback" not in said
    assert "Exception" not in said
    fingerprints = {
        Run(tmp_path / name).manifest(30).fingerprint for name in ("undisturbed", "run")
    }
    assert len(fingerprints) == 1
    assert 21 in Run(tmp_path / "run").steps(), "saved when it was asked to"


@pytest.mark.parametrize(
    ("wrapper", "how"), [("ddp", "end torchrun"), ("fsdp2", "end torchrun"), ("fsdp2", "torchrun")]
)
def test_workers_save_together_when_torchrun_gets_sigterm(
    wrapper: str, how: str, tmp_path: Path
) -> None:
    """Also if torchrun is gone before them, with the store that the program's group was made with."""
    status, said = forked(WORKER, ["--directory", str(tmp_path / "undisturbed")])
    assert status == 0, said
    run = tmp_path / "run"
    options = ("--group", "joined", "--wrapper", wrapper)
    status, said = torchrun(run, "--how", how, *options)
    with open(f"{run}.alive") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)  # both workers have ended
    assert status in (1, -signal.SIGTERM), said
    assert "SignalException" in said, "torchrun's own"
    assert "[rank" not in said, "no traceback of a worker"
    saved = Run(run).steps()[-1]
    assert 20 < saved < 30, "saved when it was asked to"
    status, said = forked(WORKER, ["--directory", str(run)])
    assert status == 0, said
    fingerprints = {Run(tmp_path / name).manifest(30).fingerprint for name in (run, "undisturbed")}
    assert len(fingerprints) == 1


def test_an_error_of_one_worker_ends_all_of_them(tmp_path: Path) -> None:
    """Worker 0 raises while worker 1 waits for its gradients."""
    status, said = torchrun(tmp_path / "run", "--group", "joined", "--how", "raise")
    assert status == 1
    assert "the program failed" in said
