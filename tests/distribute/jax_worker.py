"""Trains small models on one topology and writes the digests of the final states as a JSON line.

Run as a program, because a JAX process has one number of devices for its whole life.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import warnings
from types import SimpleNamespace
from typing import Any

import flax.nnx as nnx
import generated_functions as generated
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from training_case import FIRST, REPLICAS, STEPS, dataset, strided
from worker_program import answer, arguments

from perdure.demo import program as guards
from perdure.demo.train_jax import all_reduce
from perdure.distribute import SimpleClusterResolver
from perdure.distribute.jax.fused import hlo as jax_hlo
from perdure.distribute.jax.fused import proven_programs as jax_proven
from perdure.distribute.jax.fused import step_by_signature
from perdure.distribute.values import PerReplica
from perdure.errors import WorkerLostError
from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy


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


def drawn(shape: tuple[int, ...]) -> Any:
    """Weights by NumPy: JAX compiles the normal distribution for each shape, 0.7 s of CPU."""
    values = np.random.default_rng(shape).standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))
    return jnp.asarray(values.astype(np.float32))


# --- the network of TensorFlow's custom-training tutorial, with dropout ---


def cnn_init() -> dict[str, Any]:
    shapes = {"c1": (3, 3, 1, 32), "c2": (3, 3, 32, 64), "d1": (1600, 64), "d2": (64, 10)}
    return {
        name: {"kernel": drawn(shape), "bias": jnp.asarray(np.zeros(shape[-1], np.float32))}
        for name, shape in shapes.items()
    }


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
        per_example = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return (per_example * batch["weight"]).sum()

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
        weights: dict[str, Any] = {
            "kernel_init": lambda _key, shape, *_: drawn(shape),
            "rngs": rngs,
        }
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, **weights)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3)
        self.out = nnx.Linear(14 * 14 * 8, 10, **weights)

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
        per_example = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return (per_example * batch["weight"]).sum(), nnx.state(model, nnx.BatchStat)

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


# --- a small model, for tests that need no network ---


def tiny_grad(state: Any, batch: Any, key: Any) -> Any:
    weight = batch["weight"].sum()
    # Values that sums over several devices could change: -0.0, NaNs of two kinds, a bool, an
    # integer that wraps.
    edges = {"zero": -0.0 * weight, "any": weight > 1, "wraps": (97 * weight).astype(jnp.int8)}
    edges["nan"] = jnp.where(jax.random.bernoulli(key), jnp.nan, jnp.sqrt(-1 - weight))
    return {"sum": jax.random.normal(key, (3,)) + weight, **edges}


def tiny_update(state: Any, total: Any) -> Any:
    return {"w": state["w"] + total["sum"]}, total


# --- attention: XLA's partitioner would remove a common subexpression, so that one program for
# several devices would be other arithmetic than the program for one ---


@jax.jit
def attention_gradient(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        q = (x @ w).reshape(-1, 2, 4, 8)
        # XLA multiplies by the reciprocal for one device, and divides for several.
        a = jax.nn.softmax(q @ q.swapaxes(-1, -2) / 8**0.5)
        return ((a @ q) ** 2).sum()

    return jax.grad(loss)(w)


def attention_grad(state: Any, batch: Any, key: Any) -> Any:
    grads = attention_gradient(state["w"], pixels(batch)[:, 0, :16, 0])
    return {"grads": grads, "n": batch["weight"].sum()}


def attention_update(state: Any, total: Any) -> Any:
    return {"w": state["w"] - 0.01 * total["grads"] / total["n"]}, {}


def attention_state() -> Any:
    return {"w": drawn((16, 64))}


# --- a scan over layers: XLA's partitioner orders what no turn of a loop changes in another way ---


def scan_grad(state: Any, batch: Any, key: Any) -> Any:
    def loss(w: Any) -> Any:
        x = pixels(batch)[:, 0, :16, 0]
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2).sum()

    return {"grads": jax.grad(loss)(state["w"]), "n": batch["weight"].sum()}


def scan_state() -> Any:
    return {"w": drawn((3, 16, 16))}


MODELS = {
    "scan": (scan_state, scan_grad, attention_update),
    "attention": (attention_state, attention_grad, attention_update),
    "cnn": (cnn_state, cnn_grad, cnn_update),
    "nnx": (nnx_state, nnx_grad, nnx_update),
    "tiny": (lambda: {"w": jnp.zeros(3)}, tiny_grad, tiny_update),
}


def train(strategy: Any, model: str, data: Any = None, die_at: int | None = None) -> str:
    init, grad, update = MODELS[model]
    state, train_step = init(), strategy.step(grad, update)
    data, logs = data or dataset(), {}
    for step in range(FIRST, FIRST + STEPS):
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        state, logs = train_step(state, strategy.batch(data, step))
    return digest((state, logs))


def by_comparison() -> dict[str, Any]:
    """How many digests models have on several topologies, and whether every program was accepted.

    The attention also with the clean-up of XLA's partitioner, with the comparison and without it.
    """
    options = jax_proven._options
    originals = {name: getattr(jax_hlo, name) for name in ("difference", "step_difference")}
    answers: list[bool] = []

    def compared(name: str) -> Any:
        def compare(*arguments: Any) -> str:
            answers.append(not (different := originals[name](*arguments)))
            return different

        return compare

    out: dict[str, Any] = {}
    for model, topologies in (
        *(("tiny", (1, 2, 8)), ("scan", (1, 2)), ("attention", (1, 2))),
        ("attention, cleaned up", (1, 2)),
    ):
        jax_proven._options = (dict) if "cleaned" in model else options
        out[model] = {}
        ways = ("compared", "not compared", "both ways") if "cleaned" in model else ("compared",)
        for way in ways:
            for name in originals:
                setattr(jax_hlo, name, compared(name) if way == "compared" else lambda *_: "")
            if way == "both ways":
                os.environ["PERDURE_FAST_ON"], step_by_signature.MEASURED = "cpu", ()
            answers.clear()
            name, _, _ = model.partition(",")
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                digests = [train(MirroredStrategy(d, REPLICAS), name) for d in topologies]
            out[model][way] = (len(set(digests)), list(answers))
            out[model]["warned"] = [str(warning.message) for warning in warned]
    step_by_signature.MEASURED = ("cpu",)
    jax_proven._options = options
    for name, original in originals.items():
        setattr(jax_hlo, name, original)
    return out


def first_steps_both_ways() -> dict[str, tuple[str, str]]:
    """A run whose first steps are computed both ways, on two devices; and a slow one on one."""

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"g": pixels(batch)[:, 0, :16, 0].sum(0) * jax.random.key_data(key)[0]}

    def update(state: Any, total: Any) -> Any:
        return {"w": state["w"] + total["g"]}, total

    out, data = {}, dataset()
    step_by_signature.MEASURED = ()
    for name, devices in (("", 1), ("cpu", 2)):
        os.environ["PERDURE_FAST_ON"] = name
        strategy = MirroredStrategy(devices, REPLICAS)
        state, logs, train_step = {"w": np.zeros(16, np.float32)}, {}, strategy.step(grad, update)
        train_step.donate_results()
        for step in range(FIRST, FIRST + step_by_signature.STEPS + 1):
            state, logs = train_step(state, strategy.batch(data, step))
        out[f"{name} {devices}"] = (digest((state, logs)), strategy.explain(train_step))
    step_by_signature.MEASURED = ("cpu",)
    return out


def placed_shares() -> dict[str, list[Any]]:
    """By kind of share: the parts placed without `device_put`, and whether each device has its own,
    or that of the other.

    Once more without that call, which another release of JAX may not have.
    """
    devices = jax.devices()[:2]
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())
    rows = np.random.default_rng(0).integers(0, 2, (4, 6))
    one, two = rows[:2].astype(np.float32), rows[2:].astype(np.float32)
    columns: dict[str, list[Any]] = {
        "floats": [one, two],
        "strided": [one[:, ::2], two[:, ::2]],
        "bool": [one > 0, two > 0],
        "numbers": [np.uint32(3), np.uint32(4)],
        "int64": [rows[:2], rows[2:]],  # int32 on the devices
        "int64 and int32": [rows[:2], rows[2:].astype(np.int32)],
        "int4": [jnp.int4(one), jnp.int4(two)],
        "int4 of NumPy": [np.asarray(jnp.int4(one)), np.asarray(jnp.int4(two))],
        "arrays of JAX": [jnp.asarray(one), jnp.asarray(two)],
        "elsewhere": [jax.device_put(one, devices[1]), jax.device_put(two, devices[0])],
        "mixed": [one, jnp.asarray(two)],
    }
    calls: list[Any] = []
    find = step_by_signature._pxla
    place = find().batched_device_put
    modules = SimpleNamespace(batched_device_put=lambda *of: [calls.append(of), place(*of)][1])
    out = {}
    for module, note in ((modules, ""), (SimpleNamespace(), ", without it")):
        step_by_signature._pxla = lambda module=module: module
        for name, column in columns.items():
            calls.clear()
            array = step_by_signature._on_each(column, devices, sharding)
            parts = {shard.device: shard.data for shard in array.addressable_shards}
            found = [digest(parts[device]) for device in devices]
            expected = [digest(jax.device_put(x, d)) for x, d in zip(column, devices, strict=True)]
            assert array.sharding == sharding
            out[name + note] = [len(calls), found == expected, found == expected[::-1]]
    step_by_signature._pxla = find
    return out


def of_generated_functions(devices: int) -> str:
    """Functions of many kinds in one step, whose constants differ in the last bit."""
    kinds = (
        *(generated.arithmetic, generated.averages, generated.rounded, generated.special),
        *(generated.integers, generated.captured, generated.draws, generated.loops),
    )
    rng = np.random.default_rng(0)
    fn = generated.together([kind(rng) for kind in kinds])
    strategy = MirroredStrategy(devices, REPLICAS)
    shares = tuple(generated.share(r) for r in range(REPLICAS))
    step = strategy.step(fn, lambda state, total: (state, total))
    with np.printoptions(precision=2, suppress=True, threshold=0):
        return digest(step(generated.state(), PerReplica(shares, strategy.local_replicas, FIRST)))


def train_in_parts() -> str:
    """The same run on other devices than the step before; NumPy carries the state over."""
    init, grad, update = MODELS["cnn"]
    state, logs, data = init(), {}, dataset()
    for step, devices in zip(range(FIRST, FIRST + STEPS), (3, 1, 3), strict=True):
        strategy = MirroredStrategy(devices, REPLICAS)
        state, logs = strategy.step(grad, update)(state, strategy.batch(data, step))
        state = jax.tree.map(np.asarray, state)
    return digest((state, logs))


# --- negative controls: each removes one guard, and its result must depend on the topology ---


def controls(devices: int) -> dict[str, str]:
    def changed(change: Any) -> Any:
        strategy = MirroredStrategy(devices, REPLICAS)
        change(strategy)
        return strategy

    return {
        "psum": train(changed(lambda s: guards.sums_by_all_reduce(s, all_reduce)), "cnn"),
        "rng by device": train(changed(guards.random_numbers_by_device), "cnn"),
        "strided rows": train(MirroredStrategy(devices, REPLICAS), "cnn", strided(devices)),
    }


def main() -> None:
    args = arguments(devices="1", controls="", die_at=int, unmeasured=int, compared=int)
    if args.unmeasured:
        step_by_signature.MEASURED = ()
    out: dict[str, Any] = {}
    if args.compared:
        out["by comparison"] = by_comparison()
        out["both ways"] = first_steps_both_ways()
        out["placed"] = placed_shares()
        out["generated"] = [of_generated_functions(devices) for devices in (1, 2)]
        answer(out)
        return
    for devices in map(int, args.devices.split(",")):
        if args.processes > 1:
            cluster = SimpleClusterResolver(args.coordinator, args.processes, args.process)
            strategy: Any = MultiWorkerMirroredStrategy(cluster, REPLICAS, devices=devices)
        else:
            strategy = MirroredStrategy(devices, REPLICAS)
        if args.die_at is not None:
            try:
                train(strategy, "tiny", die_at=args.die_at if args.process else None)
            except WorkerLostError as error:
                answer({"lost": str(error)})
                os._exit(0)
        models: tuple[str, ...] = ("cnn",)
        if args.processes == 1:  # `reduce` below is enough for eight devices
            models = ("cnn", "nnx") if devices < 8 else ()
        out[str(devices)] = {model: train(strategy, model) for model in models}
        out["recipe"] = strategy.recipe(dataset())
        out["explained"] = strategy.explain(strategy.step(tiny_grad, tiny_update))
        total = strategy.reduce(
            "sum",
            strategy.run(lambda key: (jax.random.normal(key, (5,)), 1), (strategy.keys(STEPS),)),
        )
        out[str(devices)]["reduce"] = digest(total)
    if args.processes == 1 and len(jax.devices()) == 8:
        strategy = MirroredStrategy(jax.devices()[2::-1], REPLICAS)
        out["reversed"] = train(strategy, "cnn")
        out["in parts"] = train_in_parts()
    for devices in map(int, filter(None, args.controls.split(","))):
        out[f"controls {devices}"] = controls(devices)
    answer(out)


if __name__ == "__main__":
    main()
