"""Leaves that a target has whole on one device, where the run had them sharded, are named."""

from __future__ import annotations

import os
from pathlib import Path

from forked import run_forked

PROGRAM = """
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import perdure

rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
tx = optax.adam(0.1)


def start(init):
    params = jax.device_put(jnp.ones((8, 4)), rows)
    return {"params": params, "opt": init(params), "other": jnp.ones(3)}


saved = start(tx.init)
with perdure.CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, saved)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state, _ = manager.restore(like=start(jax.jit(tx.init)))
    assert ["out_shardings" in str(w.message) for w in told] == [True], told
    assert "opt/0/mu" in str(told[0].message) and "other" not in str(told[0].message)
    spread = lambda x: jax.device_put(x, rows) if x.ndim else x
    for init in (tx.init, lambda params: jax.tree.map(spread, jax.jit(tx.init)(params))):
        state, _ = manager.restore(like=start(init))  # a warning is an error here
        assert state["opt"][0].mu.sharding == rows
"""


def test_leaves_of_a_sharded_run_on_one_device_are_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    [(status, _, err)] = run_forked("jax", program, [[str(tmp_path / "run")]], [environment])
    assert status == 0, err
