"""A Trainer over the strategies of both engines: one fingerprint on any devices and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_one_fingerprint_on_any_devices_and_after_a_resume(engine: str) -> None:
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("strategies_worker.py"), engine],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    fingerprints = json.loads(ended.stdout)
    expected = fingerprints["1 device"]
    assert list(expected) == ["0", "2", "4", "6"]
    assert len(set(expected.values())) == 4, "every step changes the state"
    assert list(fingerprints.pop("interrupted")) == ["0", "2"], "the fault did not fire"
    assert fingerprints == dict.fromkeys(fingerprints, expected)
    assert len(fingerprints) == 4
