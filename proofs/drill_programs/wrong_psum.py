"""Wrong: the gradient is the framework's own sum over all devices there are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from perdure import CheckpointManager

STEPS, EVERY = 24, 4
mesh = Mesh(np.array(jax.devices()), ("device",))
x = jax.random.normal(jax.random.key(0), (24 * STEPS, 32))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("device")), out_specs=P())
def gradient(w, batch):
    error = batch @ w - jnp.sin(batch.sum(1))
    return lax.psum(batch.T @ error, "device")


with CheckpointManager("runs/psum", save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize({"w": jnp.zeros(32), "step": 0})
    for step in range(start, STEPS):
        w = state["w"] - 0.01 * gradient(state["w"], x[24 * step : 24 * step + 24])
        state = {"w": w, "step": step + 1}
        manager.save(step + 1, state)
