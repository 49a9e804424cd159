"""Small models and the optimizers of the matrix on JAX, written as a user would write them.

A cell is (init, grad, update) of one model with one optimizer; V, the data and the steps are those of
`matrix_worker`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from matrix_keras import keras_model, keras_optimizer

from perdure.distribute import LossScale
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy
from perdure.keras import Stateless

OPTIMIZERS = ("sgd", "adam", "rmsprop", "adamw")
SEED = 1


class Cell(NamedTuple):
    """The arguments of `strategy.step`, and the function that makes the first state."""

    init: Callable[[], Any]
    grad: Callable[..., Any]
    update: Callable[..., Any]


def optimizers(clip: float | None = None) -> dict[str, Any]:
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 2e-3, 2, 10)
    plain = {
        "sgd": optax.sgd(0.05, momentum=0.9),
        "adam": optax.adam(1e-3),
        "rmsprop": optax.rmsprop(1e-3),
        "adamw": optax.adamw(schedule, weight_decay=0.01),
    }
    if clip is None:
        return plain
    return {n: optax.chain(optax.clip_by_global_norm(clip), tx) for n, tx in plain.items()}


def pixels(batch: Any) -> Any:
    return batch["x"].astype(jnp.float32) / 255


def losses(logits: Any, batch: Any) -> Any:
    per_example = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (per_example * batch["weight"]).sum()


def cells(
    init: Callable[[], Any],
    model: Callable[..., Any],
    replicas: int,
    *,
    clip: float | None = None,
    ema: float | None = None,
) -> dict[str, Cell]:
    """`init()` gives (params, stats); `model(params, stats, x, key)` gives (logits, stats).

    The state holds the states of all optimizers and an update changes only its own, so that all
    of them share one compiled gradient, because compiling takes most of the time of the proof.
    """
    txs = optimizers(clip)

    def start() -> Any:
        params, stats = init()
        opt = {name: tx.init(params) for name, tx in txs.items()}
        state = {"params": params, "stats": stats, "opt": opt, "step": 0}
        return state if ema is None else {**state, "ema": params}

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, stats = model(params, state["stats"], pixels(batch), key)
            return losses(logits, batch), stats

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"grads": grads, "stats": stats, "loss": value, "weight": batch["weight"].sum()}

    def update(name: str, state: Any, total: Any) -> Any:
        grads = jax.tree.map(lambda g: g / total["weight"], total["grads"])
        changes, opt = txs[name].update(grads, state["opt"][name], state["params"])
        params = optax.apply_updates(state["params"], changes)
        new = {
            "params": params,
            "stats": jax.tree.map(lambda s: s / replicas, total["stats"]),
            "opt": {**state["opt"], name: opt},
            "step": state["step"] + 1,
        }
        if ema is not None:
            new["ema"] = jax.tree.map(
                lambda e, p, ema=ema: ema * e + (1 - ema) * p, state["ema"], params
            )
        return new, {"loss": total["loss"] / total["weight"]}

    return {name: Cell(start, grad, partial(update, name)) for name in txs}


# ---------------------------------------------------------------- plain functions


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """By NumPy: JAX compiles the normal distribution for each shape, which takes 0.7 s of CPU."""
    rng = np.random.default_rng(SEED)
    scaled = {
        name: rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))
        for name, shape in shapes.items()
    }
    return {name: jnp.asarray(values.astype(np.float32)) for name, values in scaled.items()}


def dropout(x: Any, key: Any, rate: float) -> Any:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def conv(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(p: Any, stats: Any, x: Any, key: Any) -> Any:
    x = jax.nn.relu(x.reshape(len(x), -1) @ p["in"])
    return dropout(x, key, 0.3) @ p["out"], stats


def mlp_init() -> Any:
    return weights(**{"in": (784, 64), "out": (64, 10)}), {}


def cnn(p: Any, stats: Any, x: Any, key: Any) -> Any:
    """The network of TensorFlow's custom-training tutorial, with dropout."""
    x = pool(jax.nn.relu(conv(x[..., None], p["conv1"]) + p["bias1"]))
    x = pool(jax.nn.relu(conv(x, p["conv2"]) + p["bias2"]))
    x = jax.nn.relu(x.reshape(len(x), -1) @ p["dense1"])
    return dropout(x, key, 0.4) @ p["dense2"], stats


def cnn_init() -> Any:
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "dense1": (1600, 64)}
    params = weights(**shapes, dense2=(64, 10))
    return {**params, "bias1": jnp.zeros(32), "bias2": jnp.zeros(64)}, {}


def batchnorm(p: Any, stats: Any, x: Any, key: Any) -> Any:
    """BatchNorm by the statistics of the logical replica, with running averages."""
    x = conv(x[..., None], p["conv"])
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-3) * p["scale"] + p["shift"])
    new = {
        "mean": 0.9 * stats["mean"] + 0.1 * mean,
        "variance": 0.9 * stats["variance"] + 0.1 * variance,
    }
    return pool(x).reshape(len(x), -1) @ p["out"], new


def batchnorm_init() -> Any:
    params = weights(conv=(3, 3, 1, 8), out=(13 * 13 * 8, 10))
    norm = {"scale": jnp.ones(8), "shift": jnp.zeros(8)}
    return {**params, **norm}, {"mean": jnp.zeros(8), "variance": jnp.ones(8)}


def transformer(p: Any, stats: Any, x: Any, key: Any) -> Any:
    """A transformer on the rows of an image: 28 tokens, two pre-norm blocks of two heads, no biases."""

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    x = x @ p["embed"] + p["place"]
    for block in (p["block1"], p["block2"]):
        q, k, v = jnp.split((norm(x) @ block["qkv"]).reshape(*x.shape[:2], 2, 48), 3, axis=-1)
        seen = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", q, k) / 4.0)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", seen, v).reshape(x.shape)
        x = x + dropout(mixed @ block["proj"], key, 0.1)
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return norm(x).mean(1) @ p["out"], stats


def transformer_init() -> Any:
    params = weights(embed=(28, 32), place=(28, 32), out=(32, 10))
    block = weights(qkv=(32, 96), proj=(32, 32), up=(32, 64), down=(64, 32))
    return {**params, "block1": block, "block2": block}, {}


def scanned(p: Any, stats: Any, x: Any, key: Any) -> Any:
    """Layers in a scan, computed again in the backward pass, with a gradient of their own."""

    def layer(h: Any, w: Any) -> Any:
        return bent(h @ w), None

    h = jax.nn.relu(x.reshape(len(x), -1) @ p["in"])
    h, _ = lax.scan(jax.checkpoint(layer), dropout(h, key, 0.1), p["layers"])
    return h @ p["out"], stats


@jax.custom_vjp
def bent(x: Any) -> Any:
    return jnp.tanh(x)


bent.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * jnp.exp(-jnp.abs(x)),))


def scanned_init() -> Any:
    params = weights(**{"in": (784, 32), "layers": (8, 32, 32), "out": (32, 10)})
    return {**params, "layers": params["layers"] * 16}, {}


def recurrent(p: Any, stats: Any, x: Any, key: Any) -> Any:
    """A GRU over the rows of an image."""

    def cell(h: Any, row: Any) -> Any:
        z, r = jnp.split(jax.nn.sigmoid(row @ p["gates"] + h @ p["from"]), 2, axis=-1)
        new = jnp.tanh(row @ p["in"] + (r * h) @ p["again"])
        return (1 - z) * h + z * new, None

    h, _ = lax.scan(cell, jnp.zeros((len(x), 16)), x.swapaxes(0, 1))
    return dropout(h, key, 0.1) @ p["out"], stats


def recurrent_init() -> Any:
    gates = weights(gates=(28, 32), **{"from": (16, 32), "in": (28, 16)})
    return {**gates, **weights(again=(16, 16), out=(16, 10))}, {}


def group_norm(p: Any, stats: Any, x: Any, key: Any) -> Any:
    """Two padded convolutions, each with a GroupNorm."""
    x = x[..., None]
    for name in ("conv1", "conv2"):
        x = lax.conv_general_dilated(
            x, p[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        groups = x.reshape(*x.shape[:3], 4, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = groups.var((1, 2, 4), keepdims=True)
        x = jax.nn.relu(((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape))
    return x.reshape(len(x), -1) @ p["out"], stats


def group_norm_init() -> Any:
    return weights(conv1=(3, 3, 1, 8), conv2=(3, 3, 8, 8), out=(7 * 7 * 8, 10)), {}


# ---------------------------------------------------------------- modules


class Net(nnx.Module):
    """A convolution, BatchNorm per logical replica, and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3)
        self.out = nnx.Linear(14 * 14 * 8, 10, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
        x = nnx.relu(self.norm(self.conv(x[..., None])))
        return self.out(self.drop(x.reshape(len(x), -1), rngs=rngs))


def nnx_cells(replicas: int) -> dict[str, Cell]:
    net = Net(nnx.Rngs(SEED))
    net.train()
    graph, params, stats = nnx.split(net, nnx.Param, nnx.BatchStat)

    def model(params: Any, stats: Any, x: Any, key: Any) -> Any:
        net = nnx.merge(graph, params, stats, copy=True)
        logits = net(x, nnx.Rngs(dropout=key))
        return logits, nnx.state(net, nnx.BatchStat)

    return cells(lambda: (params, stats), model, replicas)


def equinox_cells(replicas: int) -> dict[str, Cell]:
    one, two = jax.random.split(jax.random.key(SEED))
    layers = [eqx.nn.Linear(784, 48, key=one), jax.nn.relu, eqx.nn.Dropout(0.3)]
    net = eqx.nn.Sequential(
        [layers[0], eqx.nn.Lambda(layers[1]), layers[2], eqx.nn.Linear(48, 10, key=two)]
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def model(params: Any, stats: Any, x: Any, key: Any) -> Any:
        net = eqx.combine(params, static)
        keys = jax.random.split(key, len(x))
        return jax.vmap(lambda row, key: net(row.reshape(-1), key=key))(x, keys), stats

    return cells(lambda: (params, {}), model, replicas)


def keras_cell(name: str, replicas: int) -> Cell:
    net = Stateless(keras_model(SEED), keras_optimizer(name))
    first = net.state()

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(trainable: Any) -> Any:
            logits, statistics = net(state, trainable, pixels(batch)[..., None], key)
            return losses(logits, batch), statistics

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(net.trainable(state))
        return {"grads": grads, "stats": stats, "loss": value, "weight": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        grads = {path: g / total["weight"] for path, g in total["grads"].items()}
        stats = {path: s / replicas for path, s in total["stats"].items()}
        return net.apply(state, grads, stats), {"loss": total["loss"] / total["weight"]}

    return Cell(lambda: first, grad, update)


def fp16_cells() -> dict[str, Cell]:
    """The MLP in float16, with parameters in float32 and a loss scale that overflows at first."""
    txs = optimizers()

    def start() -> Any:
        params, _ = mlp_init()
        scale = LossScale(jnp.float32(2.0**16), jnp.int32(0))
        opt = {name: tx.init(params) for name, tx in txs.items()}
        return {"params": params, "opt": opt, "loss_scale": scale}

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            logits, _ = mlp(half, {}, pixels(batch).astype(jnp.float16), key)
            value = losses(logits.astype(jnp.float32), batch)
            return value * state["loss_scale"].scale, value

        (_, value), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"grads": grads, "loss": value, "weight": batch["weight"].sum()}

    def update(name: str, state: Any, total: Any) -> Any:
        divisor = total["weight"] * state["loss_scale"].scale
        grads = jax.tree.map(lambda g: g / divisor, total["grads"])
        finite = jnp.isfinite(optax.tree.norm(grads))
        changes, opt = txs[name].update(grads, state["opt"][name], state["params"])
        params = optax.apply_updates(state["params"], changes)
        new = {"params": params, "opt": {**state["opt"], name: opt}}
        old = {"params": state["params"], "opt": state["opt"]}
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        scale = state["loss_scale"].after(finite, growth_steps=2)
        return {**kept, "loss_scale": scale}, {"loss": total["loss"] / total["weight"]}

    return {name: Cell(start, grad, partial(update, name)) for name in txs}


MODELS: dict[str, Callable[[int], dict[str, Cell]]] = {
    "MLP, dropout": lambda v: cells(mlp_init, mlp, v),
    "tutorial's CNN": lambda v: cells(cnn_init, cnn, v),
    "CNN, BatchNorm": lambda v: cells(batchnorm_init, batchnorm, v),
    "transformer, clipping, EMA": lambda v: cells(
        transformer_init, transformer, v, clip=0.5, ema=0.9
    ),
    "scan, remat, custom gradient": lambda v: cells(scanned_init, scanned, v),
    "GRU": lambda v: cells(recurrent_init, recurrent, v),
    "CNN, GroupNorm": lambda v: cells(group_norm_init, group_norm, v),
    "Keras": lambda v: {name: keras_cell(name, v) for name in OPTIMIZERS},
    "NNX": nnx_cells,
    "Equinox": equinox_cells,
    "MLP, float16": lambda v: fp16_cells(),
}


def make_strategy(devices: str, replicas: int, group: bool) -> Any:
    """`devices` is a number, or "reversed" for all devices in reverse order."""
    if group:
        return MultiWorkerMirroredStrategy(replicas=replicas, devices=int(devices))
    chosen = list(reversed(jax.devices())) if devices == "reversed" else int(devices)
    return MirroredStrategy(chosen, replicas)
