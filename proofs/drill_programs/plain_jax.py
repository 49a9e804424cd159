"""A plain JAX loop: no strategy, no Trainer, three lines of perdure."""

import jax
import jax.numpy as jnp
import optax

from perdure import CheckpointManager

STEPS, EVERY = 40, 4
optimizer = optax.adam(1e-2)
x = jax.random.normal(jax.random.key(0), (512, 32))
y = jnp.sin(x.sum(1))


def init():
    keys = jax.random.split(jax.random.key(1))
    params = {
        "a": jax.random.normal(keys[0], (32, 64)) * 0.2,
        "b": jax.random.normal(keys[1], (64,)) * 0.2,
    }
    return {"params": params, "opt": optimizer.init(params), "step": 0}


@jax.jit
def update(state):
    step = state["step"]
    rows = jax.random.permutation(jax.random.key(step // 16), 512)
    batch = jax.lax.dynamic_slice(rows, (step % 16 * 32,), (32,))
    kept = jax.random.bernoulli(jax.random.key(1000 + step), 0.9, (64,))

    def loss(params):
        hidden = jnp.tanh(x[batch] @ params["a"]) * kept
        return jnp.mean((hidden @ params["b"] - y[batch]) ** 2)

    changes, opt = optimizer.update(jax.grad(loss)(state["params"]), state["opt"])
    params = optax.apply_updates(state["params"], changes)
    return {"params": params, "opt": opt, "step": step + 1}


with CheckpointManager("runs/plain", max_to_keep=3, save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize(init)
    for step in range(start, STEPS):
        state = update(state)
        manager.save(step + 1, state)
        if manager.reached_preemption(step + 1):
            manager.save_and_exit(step + 1, state)
