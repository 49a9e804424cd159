"""Training programs of JAX's libraries: each a fresh state and a step, for tests that resume them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

Fresh = Callable[[], Any]
Step = Callable[[Any, Any], Any]
Program = Callable[[], tuple[Fresh, Step]]

ROWS = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
"""A batch of each step."""


def loss_of(params: Any, x: Any) -> Any:
    return ((jnp.tanh(x @ params["w"]) + params["b"]) ** 2).sum()


def params() -> Any:
    return {"w": jax.random.normal(jax.random.key(1), (4, 3)), "b": jnp.zeros(3)}


def by_optimizer(transform: Any) -> tuple[Fresh, Step]:
    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(loss_of)(state["params"], x)
        changes, opt = transform.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], changes), "opt": opt}

    def fresh() -> Any:
        return {"params": params(), "opt": transform.init(params())}

    return fresh, step


def by_key(key: Any) -> tuple[Fresh, Step]:
    """A state of weights and a key that is split at every step."""

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        key, noise = jax.random.split(state["key"])
        moved = x + jax.random.normal(noise, x.shape)
        grads = jax.grad(loss_of)(state["params"], moved)
        new = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {"params": new, "key": key}

    return lambda: {"params": params(), "key": key()}, step


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.drop(jnp.tanh(self.norm(self.layer(x)))))


def nnx_program() -> tuple[Fresh, Step]:
    """The module and the optimizer are changed in place; the module has the stream of Dropout."""

    @nnx.jit
    def train(model: NnxNet, optimizer: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
        optimizer.update(model, grads)

    def fresh() -> Any:
        model = NnxNet(nnx.Rngs(0, dropout=1))
        return {"model": model, "opt": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}

    def step(state: Any, x: Any) -> Any:
        train(state["model"], state["opt"], x)
        return state

    return fresh, step


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


class LinenState(TrainState):
    batch_stats: Any
    key: Any


def linen_program() -> tuple[Fresh, Step]:
    net, adam = LinenNet(), optax.adam(1e-2)

    def fresh() -> Any:
        variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ROWS[0])
        return LinenState.create(
            apply_fn=net.apply,
            params=variables["params"],
            tx=adam,
            batch_stats=variables["batch_stats"],
            key=jax.random.key(2),
        )

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            variables = {"params": weights, "batch_stats": state.batch_stats}
            rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
            out, new = state.apply_fn(variables, x, rngs=rngs, mutable=["batch_stats"])
            return (out**2).sum(), new["batch_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    return fresh, step


class EquinoxNet(eqx.Module):
    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    activation: Any = eqx.field(static=True)

    def __init__(self, key: Any) -> None:
        self.layer = eqx.nn.Linear(4, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
        self.drop, self.activation = eqx.nn.Dropout(0.5), jnp.tanh

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x, state = self.norm(self.activation(self.layer(x)), state)
        return self.drop(x, key=key), state


def equinox_program() -> tuple[Fresh, Step]:
    adam = optax.adam(1e-2)

    def fresh() -> Any:
        model, stats = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
        opt = adam.init(eqx.filter(model, eqx.is_inexact_array))
        return {"model": model, "stats": stats, "opt": opt, "key": jax.random.key(3)}

    @eqx.filter_jit
    def step(state: Any, x: Any) -> Any:
        key, noise = jax.random.split(state["key"])

        def loss(model: Any) -> Any:
            over = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
            out, stats = over(x, state["stats"], jax.random.split(noise, len(x)))
            return (out**2).sum(), stats

        (_, stats), grads = eqx.filter_value_and_grad(loss, has_aux=True)(state["model"])
        changes, opt = adam.update(grads, state["opt"])
        model = eqx.apply_updates(state["model"], changes)
        return {"model": model, "stats": stats, "opt": opt, "key": key}

    return fresh, step


@flax.struct.dataclass
class Struct:
    params: Any
    velocity: Any
    rate: float = flax.struct.field(pytree_node=False, default=0.01)


class Custom:
    """A node that is registered by hand, without names for its children."""

    def __init__(self, params: Any, velocity: Any, rate: float = 0.01) -> None:
        self.params, self.velocity, self.rate = params, velocity, rate


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    params: Any
    velocity: Any
    rate: float


jax.tree_util.register_pytree_node(
    Custom, lambda c: ((c.params, c.velocity), c.rate), lambda rate, parts: Custom(*parts, rate)
)


def by_node(kind: Any) -> tuple[Fresh, Step]:
    @jax.jit
    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(loss_of)(state.params, x)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state.velocity, grads)
        new = jax.tree.map(lambda p, v: p - state.rate * v, state.params, velocity)
        return kind(new, velocity, state.rate)

    return lambda: kind(params(), jax.tree.map(jnp.zeros_like, params()), 0.01), step


PROGRAMS: dict[str, Program] = {
    "NNX": nnx_program,
    "Linen": linen_program,
    "Equinox": equinox_program,
    "struct.dataclass": partial(by_node, Struct),
    "custom node": partial(by_node, Custom),
    "register_dataclass": partial(by_node, Registered),
    # Saved in the middle of the 4 small steps of an update.
    "MultiSteps": lambda: by_optimizer(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=4)),
    "masked": lambda: by_optimizer(
        optax.chain(optax.masked(optax.adamw(1e-2), {"w": True, "b": False}), optax.sgd(0.1))
    ),
    "inject_hyperparams": lambda: by_optimizer(
        optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 8))
    ),
    "chain": lambda: by_optimizer(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.add_noise(0.1, 0.5, jax.random.key(4)),
            optax.scale_by_adam(),
            optax.scale_by_schedule(optax.linear_schedule(-0.1, 0.0, 8)),
        )
    ),
    "threefry": lambda: by_key(lambda: jax.random.key(5)),
    "rbg": lambda: by_key(lambda: jax.random.key(5, impl="rbg")),
    "raw key": lambda: by_key(lambda: jax.random.PRNGKey(5)),
}
