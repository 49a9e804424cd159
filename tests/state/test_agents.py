"""Objects of a JAX program that keep functions beside their state: the functions are code."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import UnsupportedLeafError
from perdure.state import snapshot


@dataclasses.dataclass
class Learner:
    tx: Any
    opt: Any
    losses: list[float]


class Agent:
    def __init__(self) -> None:
        self.model: Any = nn.Dense(2)
        self.params = self.model.init(jax.random.key(0), jnp.ones((1, 3)))
        tx = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.1, 0, 9))
        )
        self.learner = Learner(tx, tx.init(self.params), [])
        self.key = jax.random.key(1)
        self.loss = jax.jit(lambda p, x: jnp.square(self.model.apply(p, x)).sum())
        self.grad = jax.value_and_grad(self.loss)
        self.noise = {"normal": partial(jax.random.normal, shape=(4, 3)), "of": jax.nn.relu}

    def step(self) -> None:
        self.key, key = jax.random.split(self.key)
        loss, grads = self.grad(self.params, self.noise["of"](self.noise["normal"](key)))
        changes, self.learner.opt = self.learner.tx.update(grads, self.learner.opt)
        self.params = optax.apply_updates(self.params, changes)
        self.learner.losses.append(float(loss))


def train(where: MemoryStorage, stop: int) -> dict[str, bytes]:
    with CheckpointManager(where, recipe={}) as manager:
        state, start = manager.restore_or_initialize({"agent": Agent()})
        for step in range(start, stop):
            state["agent"].step()
            manager.save(step + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


def test_an_agent_with_functions_resumes_with_the_same_bits() -> None:
    whole = train(MemoryStorage(), 5)
    train(where := MemoryStorage(), 2)
    assert train(where, 5) == whole


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", lambda *_: 0.0),
        ("loss", None),
        ("model", nn.Dense(3)),
        ("learner", Learner(optax.sgd(0.1), (), [])),
        ("key", np.add),
    ],
)
def test_another_function_is_refused(name: str, value: Any) -> None:
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"agent": Agent()})
        assert manager.save(1, state)
        setattr(state["agent"], name, value)
        with pytest.raises(
            UnsupportedLeafError, match=rf"agent/{name}.*: this was another function"
        ):
            manager.save(2, state)


def test_a_function_outside_of_an_object_is_refused() -> None:
    with (
        CheckpointManager(MemoryStorage(), recipe={}) as manager,
        pytest.raises(
            UnsupportedLeafError, match=r"tx/init: a value of type .*function has no exact"
        ),
    ):
        manager.restore_or_initialize({"tx": optax.adam(0.1)})
