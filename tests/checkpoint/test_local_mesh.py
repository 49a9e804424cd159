"""A state on a mesh of one process: the loop does not wait until its shards are put together."""

from __future__ import annotations

import os
from pathlib import Path

from forked import run_forked

PROGRAM = Path(__file__).with_name("local_mesh_program.py")


def test_arrays_on_several_devices_are_saved_from_their_shards(tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    [(status, out, err)] = run_forked("jax", PROGRAM, [[str(tmp_path)]], [environment])
    assert (status, out) == (0, "same bits\n"), err
