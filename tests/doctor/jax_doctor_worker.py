"""Kernels of the doctor on JAX, one of them wrong on one device; then the check of a first step.

The argument names a device whose fused step is wrong.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from perdure.data import ArrayDataset
from perdure.distribute import step
from perdure.doctor import jax_kernels
from perdure.doctor.kernels import KERNELS, compute_kernels, program_of
from perdure.jax import MirroredStrategy

CHECKED = ("matmul of one row",)


def note(event):
    sys.stdout.write(json.dumps(event) + "\n")


def check_kernel_of_each_kind():
    placed_on = []
    place = jax_kernels.place

    def watched(array, dtype, device):
        placed_on.append(device)
        return place(array, dtype, device)

    def planted(x):
        return {"result": jnp.sum(x) + jnp.float32(placed_on[-1] == jax.local_devices()[2])}

    names = []
    for name in jax_kernels.FUNCTIONS:
        arrays = KERNELS[name].inputs(np.random.default_rng(0))
        assert jax.eval_shape(program_of(jax_kernels, name), *arrays)
        names.append(name)
    note({"e": "built", "names": names, **jax_kernels.describe()})
    jax_kernels.place = watched
    KERNELS["planted"] = KERNELS["sum"]
    checked = {name: jax_kernels.FUNCTIONS[name] for name in CHECKED}
    jax_kernels.FUNCTIONS = {**checked, "planted": planted}
    compute_kernels(jax_kernels, 2, note)


def grad(state, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    gradient = jax.grad(
        lambda w: (jnp.tanh(batch["x"] @ w + noise) * batch["weight"][:, None]).sum()
    )
    return {"g": gradient(state["w"]), "n": batch["weight"].sum()}


def update(state, total):
    return {"w": state["w"] - 0.1 * total["g"] / total["n"]}, {"n": total["n"]}


def check_step(wrong):
    """The first step, and again with a fused step that is wrong on a device."""
    strategy = MirroredStrategy(devices=2, replicas=2)
    dataset = ArrayDataset({"x": np.ones((16, 4), np.float32)}, batch_size=16, seed=1)
    if wrong:
        engine: Any = strategy.engine
        make = engine.fused_step

        def fused_step(*arguments):
            fused = make(*arguments)

            def step(*arguments):
                state, logs = fused(*arguments)
                values = engine.place(state)
                values[1] = {"w": values[1]["w"].at[0, 0].add(1e-6)}
                return engine.replicate(values), logs

            return step

        engine.fused_step = fused_step
    train_step = strategy.step(grad, update)
    state = {"w": jnp.eye(4)}
    train_step(state, strategy.batch(dataset, 0))


HOOK = SimpleNamespace(
    is_doctor=True, checked_step=lambda results: note({"e": "checked", "results": results})
)
patch.object(step, "drill_hook", lambda: HOOK).start()
check_kernel_of_each_kind()
check_step(wrong=False)
check_step(wrong=True)
