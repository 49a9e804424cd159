"""A step that donates its state while a save of that state is still under way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perdure import CheckpointManager, MemoryStorage, verify_run
from perdure.state import restore
from perdure.store import Run

STEPS = 500
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


def test_every_asynchronous_save_of_a_donated_state_equals_a_synchronous_copy() -> None:
    storage = MemoryStorage()
    donated = 0
    state = initial()
    with CheckpointManager(storage, max_to_keep=None) as manager:
        for step in range(1, STEPS + 1):
            before, state = state, donating(state)
            donated += before["w"].is_deleted()
            manager.save(step, state)
    assert donated, "a buffer that no save holds is used again"
    # The copies come from a second run that donates nothing: taking one in the loop above would hold
    # the buffer, and that alone would keep a step from using it again.
    truth: dict[int, dict[str, bytes]] = {}
    state = initial()
    for step in range(1, STEPS + 1):
        state = pure(state)
        truth[step] = bits(state)
    run = Run(storage)
    assert run.steps() == list(range(1, STEPS + 1))
    wrong = [
        step
        for step in run.steps()
        if bits(restore(initial(), run.load(step).leaves)) != truth[step]
    ]
    assert wrong == []
    assert verify_run(run).problems == ()


def test_the_state_is_really_donated() -> None:
    """Control: without a save that reads it, the buffer is reused and the array is deleted."""
    state = initial()
    donating(state)
    assert state["w"].is_deleted()
