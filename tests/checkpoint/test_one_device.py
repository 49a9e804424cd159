"""Leaves that a restore would put whole onto one device, where the run had them sharded, are named."""

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
import perdure.errors

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


def refused(other):
    # The error of a save of a dict that has lost a key, and has an array on other devices.
    with perdure.CheckpointManager(perdure.MemoryStorage()) as manager:
        manager.restore_or_initialize(state := {"x": {"a": jnp.ones(4), "b": other, "c": 1}})
        del state["x"]["c"]
        try:
            manager.save(1, state)
        except perdure.errors.UnsupportedLeafError as error:
            return str(error)
    return ""


here, there = jax.devices()[:2]
assert not refused(jnp.ones(4)) and not refused(jax.device_put(jnp.ones(4), here))
for where in (there, rows, NamedSharding(rows.mesh, PartitionSpec())):
    error = refused(jax.device_put(jnp.ones(4), where))
    assert "x/b: " in error and str(there) in error, error
pinned = jax.sharding.SingleDeviceSharding(here, memory_kind="pinned_host")
assert "pinned_host" in refused(jax.device_put(jnp.ones(4), pinned))
"""


def test_leaves_that_a_restore_would_put_on_one_device_are_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    [(status, _, err)] = run_forked("jax", program, [[str(tmp_path / "run")]], [environment])
    assert status == 0, err
