"""Trains small models on one topology and writes the digests of the final states as a JSON line.

Run as a program, because a JAX process has one number of devices for its whole life.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from perdure.data import ArrayDataset
from perdure.distribute import SimpleClusterResolver
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy

REPLICAS = 8
STEPS = 3
BATCH = 4 * REPLICAS


def dataset() -> ArrayDataset:
    rng = np.random.default_rng(7)
    # 5 batches of which the last is padded; 3 steps do not reach it, so start at step 3.
    x = rng.integers(0, 256, (4 * BATCH + 9, 28, 28), dtype=np.uint8)
    return ArrayDataset({"x": x, "y": rng.integers(0, 10, len(x))}, BATCH, seed=3)


def digest(tree: Any) -> str:
    """SHA-256 over path, dtype, shape and bytes of every leaf."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:16]


def pixels(batch: Any) -> Any:
    return batch["x"][..., None].astype(jnp.float32) / 255


# --- the network of TensorFlow's custom-training tutorial, with dropout ---


def cnn_init() -> dict[str, Any]:
    key = jax.random.key(0)
    shapes = {"c1": (3, 3, 1, 32), "c2": (3, 3, 32, 64), "d1": (1600, 64), "d2": (64, 10)}
    params = {}
    for (name, shape), k in zip(shapes.items(), jax.random.split(key, 4), strict=True):
        fan = float(np.prod(shape[:-1]))
        params[name] = {
            "kernel": jax.random.normal(k, shape) / np.sqrt(fan),
            "bias": jnp.zeros(shape[-1]),
        }
    return params


def cnn(params: Any, x: Any, key: Any) -> Any:
    def conv(x: Any, p: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, p["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jax.nn.relu(y + p["bias"])
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    x = conv(conv(x, params["c1"]), params["c2"]).reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["d1"]["kernel"] + params["d1"]["bias"])
    x = jnp.where(jax.random.bernoulli(key, 0.6, x.shape), x / 0.6, 0.0)
    return x @ params["d2"]["kernel"] + params["d2"]["bias"]


OPTIMIZER = optax.adam(1e-3)


def cnn_state() -> Any:
    params = cnn_init()
    return {"params": params, "opt": OPTIMIZER.init(params), "step": 0}


def cnn_grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(params: Any) -> Any:
        logits = cnn(params, pixels(batch), key)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return (each * batch["weight"]).sum()

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"grads": grads, "loss": (value, batch["weight"].sum())}


def cnn_update(state: Any, total: Any) -> Any:
    loss, weight = total["loss"]
    grads = jax.tree.map(lambda g: g / weight, total["grads"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    new = {
        "params": optax.apply_updates(state["params"], updates),
        "opt": opt,
        "step": state["step"] + 1,
    }
    return new, {"loss": loss / weight}


# --- Flax NNX, with BatchNorm per logical replica and dropout ---


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3)
        self.out = nnx.Linear(14 * 14 * 8, 10, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(self.drop(x.reshape(x.shape[0], -1), rngs=rngs))


@functools.cache
def nnx_parts() -> Any:
    # Not at import: the strategy must come before the first computation.
    model = Net(nnx.Rngs(0))
    model.train()
    return nnx.split(model, nnx.Param, nnx.BatchStat)


def nnx_state() -> Any:
    _, params, stats = nnx_parts()
    return {"params": params, "stats": stats, "opt": OPTIMIZER.init(params)}


def nnx_grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(params: Any) -> Any:
        model = nnx.merge(nnx_parts()[0], params, state["stats"], copy=True)
        logits = model(pixels(batch), nnx.Rngs(dropout=key))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return (each * batch["weight"]).sum(), nnx.state(model, nnx.BatchStat)

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    return {"grads": grads, "stats": stats, "loss": (value, batch["weight"].sum())}


def nnx_update(state: Any, total: Any) -> Any:
    loss, weight = total["loss"]
    grads = jax.tree.map(lambda g: g / weight, total["grads"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    new = {
        "params": optax.apply_updates(state["params"], updates),
        "stats": jax.tree.map(lambda s: s / REPLICAS, total["stats"]),
        "opt": opt,
    }
    return new, {"loss": loss / weight}


MODELS = {
    "cnn": (cnn_state, cnn_grad, cnn_update),
    "nnx": (nnx_state, nnx_grad, nnx_update),
}


def train(strategy: Any, model: str) -> str:
    init, grad, update = MODELS[model]
    data, state, train_step = dataset(), init(), strategy.step(grad, update)
    logs = {}
    for step in range(2, 2 + STEPS):
        state, logs = train_step(state, strategy.batch(data, step))
    return digest((state, logs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--devices", default="1")
    args = parser.parse_args()
    out: dict[str, Any] = {}
    for devices in map(int, args.devices.split(",")):
        if args.processes > 1:
            cluster = SimpleClusterResolver(args.coordinator, args.processes, args.process)
            strategy: Any = MultiWorkerMirroredStrategy(cluster, REPLICAS, devices=devices)
        else:
            strategy = MirroredStrategy(devices, REPLICAS)
        out[str(devices)] = {model: train(strategy, model) for model in MODELS}
        out["recipe"] = strategy.recipe(dataset())
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
