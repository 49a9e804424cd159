"""A jitted step that donates its state while a save of that state is still running.

Shared by the tests and by `make proof-store`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perdure import CheckpointManager
from perdure.state import restore
from perdure.store import Run

SHAPES = {"w": (40, 50), "m": (40, 50), "b": (3,)}


def initial() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    arrays = {
        name: jax.random.normal(key, shape)
        for (name, shape), key in zip(SHAPES.items(), keys, strict=True)
    }
    return {**arrays, "key": jax.random.key(1), "step": jnp.int32(0)}


def step_of(state: dict[str, Any]) -> dict[str, Any]:
    key, noise = jax.random.split(state["key"])
    m = 0.9 * state["m"] + jax.random.normal(noise, state["m"].shape)
    return {
        "w": state["w"] - 0.01 * m,
        "m": m,
        "b": state["b"] * 1.01,
        "key": key,
        "step": state["step"] + 1,
    }


pure = jax.jit(step_of)
donating = jax.jit(step_of, donate_argnums=0)


def bits(state: Any) -> dict[str, bytes]:
    return {
        name: np.array(jax.random.key_data(leaf) if name == "key" else leaf).tobytes()
        for name, leaf in state.items()
    }


def save_while_donating(where: Any, steps: int) -> list[bool]:
    """Save after each donating step; return which steps took over the buffers of their state."""
    taken_over, state = [], initial()
    with CheckpointManager(where, max_to_keep=None) as manager:
        for step in range(1, steps + 1):
            before, state = state, donating(state)
            taken_over.append(before["w"].is_deleted())
            manager.save(step, state)
    return taken_over


def equal_to_copies(where: Any, steps: int) -> list[bool]:
    """For each step, whether its checkpoint has the bits of a run that neither saves nor donates.

    A copy in the loop itself would hold the buffer, which alone would keep a step from taking it over.
    """
    run, state, equal = Run(where), initial(), []
    for step in range(1, steps + 1):
        state = pure(state)
        equal.append(bits(restore(initial(), run.load(step).leaves)) == bits(state))
    return equal


def taken_over_without_saves(steps: int) -> list[bool]:
    """The control: which steps take over the buffers of their state if nothing is saved."""
    taken_over, state = [], initial()
    for _ in range(steps):
        before, state = state, donating(state)
        taken_over.append(before["w"].is_deleted())
    return taken_over
