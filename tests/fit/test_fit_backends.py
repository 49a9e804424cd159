"""A `fit` that is killed in the middle of an epoch, on the backends that compile their steps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_killed_and_resumed(backend: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed here")
    settings = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "backend_worker.py"), str(tmp_path)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["backend"] == backend
    assert told["killed"] == -9
    assert told["equal"]
    assert 0 < told["left"] < told["all"]
