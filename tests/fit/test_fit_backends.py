"""A `fit` that is killed in the middle of an epoch, on the backends that compile their steps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_program(name: str, backend: str, directory: Path) -> list[str]:
    """The lines that a program of this directory prints under one of Keras's backends."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed here")
    settings = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / name), str(directory)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_killed_and_resumed(backend: str, tmp_path: Path) -> None:
    told = json.loads(run_program("backend_worker.py", backend, tmp_path)[-1])
    assert told["backend"] == backend
    assert told["killed"] == -9
    assert told["equal"]
    assert 0 < told["left"] < told["all"]


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_the_behaviours_that_the_tests_of_keras_ask_for(backend: str, tmp_path: Path) -> None:
    lines = run_program("keras_behaviours.py", backend, tmp_path)
    ran_on, results = json.loads(lines[-1])
    assert ran_on == backend
    assert len(results) == 11
    failed = {name: error for name, error in results.items() if error}
    assert not failed, "\n".join(failed.values())
