"""Imports from Orbax, in a fork of a process that has JAX."""

from __future__ import annotations

import json
from pathlib import Path

from forked import run_forked

WORKER = Path(__file__).with_name("orbax_worker.py")


def test_the_bits_come_from_orbax(tmp_path: Path) -> None:
    ((status, output, errors),) = run_forked("keras-jax", WORKER, [[str(tmp_path)]], [{}])
    assert status == 0, errors
    orbax = json.loads(output.splitlines()[-1])
    assert orbax["back"] == [
        ["name", "py:str", []],
        ["params/b", "bfloat16", [3]],
        ["params/scale", "float64", []],
        ["params/w", "float32", [2, 3]],
        ["step", "py:int", []],
    ]
    assert orbax["same"]
    assert orbax["standard"] == [["train/params/w", "bfloat16", [4, 2]]]
    assert orbax["no such"] == "DataError"
