"""The demo's training program on JAX: a hand-written loop, as a user would write it.

The network is that of TensorFlow's custom-training tutorial, with dropout.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.demo.program import main
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy

DROPOUT = 0.3
optimizer = optax.adam(1e-3)


def init(seed: int) -> Any:
    """Fresh parameters (He initialisation), optimizer and loss accumulators."""
    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (1600, 64),
        "dense2": (64, 10),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    he = jax.nn.initializers.he_normal()
    params = {
        name: {"kernel": he(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    zero = jnp.zeros(())
    return {
        "params": params,
        "opt": optimizer.init(params),
        "step": 0,
        "loss": {"sum": zero, "weight": zero},
    }


def network(params: Any, image: Any, key: Any | None) -> Any:
    """Logits [n, 10] of images [n, 28, 28, 1], with dropout if `key` is given."""
    x = _pool(_conv(params["conv1"], image))
    x = _pool(_conv(params["conv2"], x)).reshape(image.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0)
    return x @ params["dense2"]["kernel"] + params["dense2"]["bias"]


def grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(params: Any) -> Any:
        logits = network(params, batch["image"], key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return (losses * batch["weight"]).sum()

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"grads": grads, "loss": {"sum": value, "weight": batch["weight"].sum()}}


def update(state: Any, total: Any) -> tuple[Any, Any]:
    weight = total["loss"]["weight"]
    grads = jax.tree.map(lambda g: g / weight, total["grads"])
    changes, opt = optimizer.update(grads, state["opt"], state["params"])
    new = {
        "params": optax.apply_updates(state["params"], changes),
        "opt": opt,
        "step": state["step"] + 1,
        "loss": jax.tree.map(jnp.add, state["loss"], total["loss"]),
    }
    return new, total["loss"]


@jax.jit
def evaluate(state: Any, batch: Any) -> Any:
    logits = network(state["params"], batch["image"], None)
    right = (logits.argmax(-1) == batch["label"]) * batch["weight"]
    return {"right": right.sum(), "weight": batch["weight"].sum()}


def _conv(layer: Any, x: Any) -> Any:
    y = lax.conv_general_dilated(
        x, layer["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + layer["bias"])


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def make_strategy(devices: int, replicas: int, seed: int, group: bool) -> Any:
    if group:
        return MultiWorkerMirroredStrategy(replicas=replicas, devices=devices, seed=seed)
    return MirroredStrategy(devices=devices, replicas=replicas, seed=seed)


def all_reduce(engine: Any, values: list[Any]) -> Any:
    """What the demo shows not to do: the framework's sum over devices."""
    devices = list(engine.devices) if engine.processes.count == 1 else jax.devices()
    mesh = Mesh(np.array(devices), ("device",))
    split = NamedSharding(mesh, P("device"))

    def stack(*parts: Any) -> Any:
        shape = (len(devices), *parts[0].shape)
        return jax.make_array_from_single_device_arrays(shape, split, [p[None] for p in parts])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("device"), out_specs=P())
    def add(tree: Any) -> Any:
        return jax.tree.map(lambda x: lax.psum(x[0], "device"), tree)

    return jax.tree.map(lambda x: x.addressable_data(0), add(jax.tree.map(stack, *values)))


if __name__ == "__main__":
    main(sys.modules[__name__])
