"""Under torchrun: a script that ends in order ends quietly, and an error ends all workers at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forked import TOPOLOGY, run_forked
from perdure import EXIT_PREEMPTED
from perdure.store import Run

WORKER = Path(__file__).parent / "torchrun_worker.py"
LIMIT_S = 120


def torchrun(directory: Path, *arguments: str, restarts: int = 0) -> tuple[int, str]:
    """The exit status, and standard error of torchrun and its two workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command += [str(WORKER), "--directory", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr


def test_a_preempted_worker_is_restarted_and_all_end_quietly(tmp_path: Path) -> None:
    """Status 75 counts as a failure for torchrun, which starts the group again."""
    # One process has the same bits: all workers have one batch, and (g + g) / 2 is g.
    alone = ["--directory", str(tmp_path / "undisturbed")]
    environment = {name: text for name, text in os.environ.items() if name not in TOPOLOGY}
    [(status, _, said)] = run_forked("torch", WORKER, [alone], [environment])
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


def test_an_error_of_one_worker_ends_all_of_them(tmp_path: Path) -> None:
    """Worker 0 raises while worker 1 waits for its gradients."""
    status, said = torchrun(tmp_path / "run", "--group", "joined", "--how", "raise")
    assert status == 1
    assert "the program failed" in said
