"""Training steps on JAX: perdure's exact ones, and plain data parallelism under jit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from distribute_case import WIDE, Group, data
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute import PerReplica
from perdure.distribute.jax.xla_settings import pin
from perdure.jax import MirroredStrategy

# For the plain steps as well: the size of the pool changes how convolutions are split.
pin()
Step = Callable[[], float]
OPTIMIZER = optax.adam(1e-3)


def _dense(key: Any, inside: int, outside: int) -> Any:
    return {
        "w": jax.random.normal(key, (inside, outside)) / inside**0.5,
        "b": jnp.zeros(outside),
    }


def _linear(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def _mlp_init(keys: Any) -> Any:
    return {"a": _dense(next(keys), 784, 512), "b": _dense(next(keys), 512, 10)}


def _mlp(p: Any, x: Any) -> Any:
    return _linear(p["b"], jax.nn.relu(_linear(p["a"], x.reshape(len(x), -1))))


def _cnn_init(keys: Any) -> Any:
    def conv(inside: int, outside: int) -> Any:
        scale = (9 * inside) ** 0.5
        w = jax.random.normal(next(keys), (3, 3, inside, outside)) / scale
        return {"w": w, "b": jnp.zeros(outside)}

    return {
        "c1": conv(1, 32),
        "c2": conv(32, 64),
        "a": _dense(next(keys), 1600, 64),
        "b": _dense(next(keys), 64, 10),
    }


def _cnn(p: Any, x: Any) -> Any:
    h = x[..., None]
    for name in ("c1", "c2"):
        h = jax.lax.conv_general_dilated(
            h, p[name]["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = jax.nn.relu(h + p[name]["b"])
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return _linear(p["b"], jax.nn.relu(_linear(p["a"], h.reshape(len(h), -1))))


def _transformer_init(keys: Any, width: int = 128, depth: int = 2) -> Any:
    block = lambda: {  # noqa: E731
        "qkv": _dense(next(keys), width, 3 * width),
        "o": _dense(next(keys), width, width),
        "up": _dense(next(keys), width, 4 * width),
        "down": _dense(next(keys), 4 * width, width),
    }
    return {
        "embed": jax.random.normal(next(keys), (256, width)),
        "place": jnp.zeros((32, width)),
        "blocks": [block() for _ in range(depth)],
        "out": _dense(next(keys), width, 256),
    }


def _transformer(p: Any, x: Any, heads: int = 4) -> Any:
    def norm(h: Any) -> Any:
        return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)

    h = p["embed"][x] + p["place"]
    for block in p["blocks"]:
        q, k, v = (
            part.reshape(*h.shape[:2], heads, -1).transpose(0, 2, 1, 3)
            for part in jnp.split(_linear(block["qkv"], norm(h)), 3, axis=-1)
        )
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5) @ v
        h = h + _linear(block["o"], a.transpose(0, 2, 1, 3).reshape(h.shape))
        h = h + _linear(block["down"], jax.nn.relu(_linear(block["up"], norm(h))))
    return _linear(p["out"], h)


def _gru_init(keys: Any, width: int = 128) -> Any:
    return {
        "x": _dense(next(keys), 28, 3 * width),
        "h": _dense(next(keys), width, 3 * width),
        "out": _dense(next(keys), width, 10),
    }


def _gru(p: Any, x: Any) -> Any:
    """The rows of an image, one after another."""

    def cell(h: Any, row: Any) -> tuple[Any, None]:
        r, z, n = jnp.split(_linear(p["x"], row), 3, axis=-1)
        hr, hz, hn = jnp.split(_linear(p["h"], h), 3, axis=-1)
        z = jax.nn.sigmoid(z + hz)
        return (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h, None

    start = jnp.zeros((len(x), p["h"]["w"].shape[0]))
    return _linear(p["out"], jax.lax.scan(cell, start, x.swapaxes(0, 1))[0])


def _scan_init(keys: Any, width: int = 256, depth: int = 8) -> Any:
    layers = [_dense(next(keys), width, width) for _ in range(depth)]
    return {
        "a": _dense(next(keys), 784, width),
        "layers": jax.tree.map(lambda *of: jnp.stack(of), *layers),
        "b": _dense(next(keys), width, 10),
    }


def _scan(p: Any, x: Any) -> Any:
    h = jax.nn.relu(_linear(p["a"], x.reshape(len(x), -1)))
    h, _ = jax.lax.scan(lambda h, layer: (h + jax.nn.relu(_linear(layer, h)), None), h, p["layers"])
    return _linear(p["b"], h)


def _wide_init(keys: Any) -> Any:
    return [_dense(next(keys), *sizes) for sizes in itertools.pairwise(WIDE)]


def _wide(p: Any, x: Any) -> Any:
    h = x.reshape(len(x), -1)
    for layer in p[:-1]:
        h = jax.nn.relu(_linear(layer, h))
    return _linear(p[-1], h)


MODELS = {
    "mlp": (_mlp_init, _mlp),
    "wide": (_wide_init, _wide),
    "cnn": (_cnn_init, _cnn),
    "transformer": (_transformer_init, _transformer),
    "gru": (_gru_init, _gru),
    "scan8": (_scan_init, _scan),
}


def _functions(model: str) -> tuple[Any, Any, Any]:
    """(state, grad, update); `grad` returns sums, as a strategy requires."""
    init, apply = MODELS[model]

    def grad(state: Any, batch: Any, key: Any) -> Any:
        x, y = batch

        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).sum()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"grads": grads, "loss": value, "n": jnp.float32(y.size)}

    def update(state: Any, total: Any) -> Any:
        grads = jax.tree.map(lambda g: g / total["n"], total["grads"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, total["loss"] / total["n"]

    params = init(iter(jax.random.split(jax.random.key(0), 20)))
    return {"params": params, "opt": OPTIMIZER.init(params)}, grad, update


def _ended(state: Any, loss: Any) -> float:
    jax.block_until_ready(state)
    return float(loss)


def exact(
    group: Group, model: str, batch: str, replicas: str, devices: str, donate: str = ""
) -> Step:
    v = int(replicas)
    strategy: Any = MirroredStrategy(int(devices), v)
    state, grad, update = _functions(model)
    shares = zip(*(np.split(part, v) for part in data(model, int(batch))), strict=True)
    values, mine = tuple(shares), strategy.local_replicas
    train_step, count = strategy.step(grad, update, donate=bool(donate)), iter(range(10**9))

    def step() -> float:
        nonlocal state
        state, loss = train_step(state, PerReplica(values, mine, next(count)))
        return _ended(state, loss)

    return step


def plain(group: Group, model: str, batch: str, devices: str, donate: str = "") -> Step:
    """One jitted step; the batch is split over the devices and the state is on each device."""
    return _plain(model, batch, devices, lambda fn, _: fn, lambda total: total, bool(donate))


def mapped(group: Group, model: str, batch: str, devices: str) -> Step:
    """The same with explicit parallelism: shard_map, and psum of the gradients."""

    def over(fn: Any, mesh: Any) -> Any:
        into = (P(), P("d"))
        return jax.shard_map(fn, mesh=mesh, in_specs=into, out_specs=P(), check_vma=False)

    return _plain(model, batch, devices, over, lambda total: jax.lax.psum(total, "d"))


def _plain(model: str, batch: str, devices: str, over: Any, add: Any, donate: bool = False) -> Step:
    state, grad, update = _functions(model)
    mesh = Mesh(np.array(jax.devices()[: int(devices)]), ("d",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
    one = over(lambda state, batch: update(state, add(grad(state, batch, None))), mesh)
    program = jax.jit(one, out_shardings=whole, donate_argnums=(0,) if donate else ())
    state = jax.device_put(state, whole)
    rows = data(model, int(batch))

    def step() -> float:
        nonlocal state
        state, loss = program(state, jax.device_put(rows, split))
        return _ended(state, loss)

    return step


def compilations() -> dict[int, tuple[int, float]]:
    """The number of programs compiled for a first step and their seconds, by number of replicas."""
    durations: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: (  # pyright: ignore[reportArgumentType]
            durations.append(duration)
            if event == "/jax/core/compile/backend_compile_duration"
            else None
        )
    )
    out = {}
    for replicas in (2, 1, 2, 4, 8, 16, 32, 64):
        step = exact(Group(), "cnn", str(4 * replicas), str(replicas), "1")
        durations.clear()
        start = time.perf_counter()
        step()
        out[replicas] = (len(durations), sum(durations), time.perf_counter() - start)
    return {v: figures[:2] for v, figures in sorted(out.items())}
