"""A restored state has the saved tree structure, for every kind of container.

Random trees mix the containers of all adapters. Each is saved and restored into a target that is
made in the same way with other values. The controls: the target's values differ before, and a tree with
another container has another structure.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from perdure import CheckpointManager
from perdure.state import flatten, restore, snapshot

Make = Callable[[int], Any]
"""A value from a number: of one structure for all numbers, with other bits for each."""


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    one: Any
    two: Any = dataclasses.field(init=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    one: Any
    two: Any
    name: str = dataclasses.field(default="static", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    one: Any
    two: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


class Custom:
    """A node that is registered without names for its children."""

    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two


jax.tree_util.register_pytree_node(
    Custom, lambda c: ((c.one, c.two), "aux"), lambda _aux, children: Custom(*children)
)


class Net(nnx.Module):
    def __init__(self, k: int) -> None:
        rngs = nnx.Rngs(k)
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


class Stateful(eqx.Module):
    layers: list[Any]
    norm: eqx.nn.BatchNorm
    name: str = eqx.field(static=True)

    def __init__(self, k: int) -> None:
        self.layers = [eqx.nn.Linear(2, 2, key=jax.random.key(k)), jax.nn.relu]
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.name = "net"


def stateful(k: int) -> Any:
    return eqx.nn.make_with_state(Stateful)(k)[0]


def params(k: int) -> Any:
    return {"w": jnp.full((2, 3), k, jnp.float32), "b": jnp.full(3, k, jnp.bfloat16)}


def state_of(transform: optax.GradientTransformation) -> Make:
    state = transform.init(params(0))
    return lambda k: jax.tree.map(lambda x: x | (k == 1) if x.dtype == bool else x + k, state)


mask = {"w": True, "b": False}
ADAM = optax.adam(1e-3)
OPTIMIZERS = [
    optax.adam(1e-3),
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2).gradient_transformation(),
    optax.masked(optax.adam(1e-3), mask),
    optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1.0, 0.0, 10)),
    optax.partition({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
]

ARRAYS: list[Make] = [
    lambda k: jnp.full((2, 3), k, jnp.float32),
    lambda k: jnp.full(3, k, jnp.bfloat16),
    lambda k: jnp.full((), k, jnp.int32),
    lambda k: jnp.full((2,), k == 1),
    lambda k: jnp.asarray(0.1 * k),  # weakly typed
    lambda k: jnp.full((2, 2), k),  # weakly typed
    lambda k: jax.random.key(k),
    lambda k: jax.random.split(jax.random.key(k, impl="rbg"), 2),
    lambda k: jax.random.PRNGKey(k),
    lambda _k: None,
    lambda k: np.full(2, k, np.float32),
]
NODES: list[Make] = [
    params,
    *map(state_of, OPTIMIZERS),
    lambda k: nnx.state(Net(k)),
    lambda k: nnx.split(Net(k), nnx.Param, ...)[1],
    lambda k: nnx.Param(jnp.full(2, k, jnp.float32)),
    lambda k: eqx.partition(stateful(k), eqx.is_array)[0],
    lambda k: jax.tree.map(lambda x: x + k, eqx.nn.make_with_state(Stateful)(k)[1]),
    lambda k: jax.tree_util.Partial(jnp.add, jnp.full(2, k, jnp.float32)),
]
"""Containers with arrays alone, which `jit` takes."""

OBJECTS: list[Make] = [
    stateful,
    Net,
    lambda k: nnx.Optimizer(Net(k), ADAM, wrt=nnx.Param),
    lambda k: np.random.default_rng(k),
    lambda k: k,
    lambda k: k / 3,
    lambda k: f"text {k}",
    lambda k: np.float64(k),
    lambda _k: {},
    lambda _k: [],
]


def holders(parts: list[Make]) -> list[Make]:
    """Every kind of container around `parts`."""
    one, two = parts[0], parts[-1]
    return [
        lambda k: {str(i): part(k) for i, part in enumerate(parts)},
        lambda k: {i - 1: part(k) for i, part in enumerate(parts)},
        lambda k: [part(k) for part in parts],
        lambda k: tuple(part(k) for part in parts),
        lambda k: Pair(one(k), two(k)),
        lambda k: collections.OrderedDict(z=one(k), a=two(k)),
        lambda k: collections.defaultdict(list, z=one(k), a=two(k)),
        lambda k: flax.core.FrozenDict(a=one(k), b={"c": two(k)}),
        lambda k: nnx.State({"a": one(k), "b": {"c": two(k), "d": {}}, "e": nnx.State({})}),
        lambda k: Registered(one(k), two(k)),
        lambda k: Struct(one(k), two(k)),
        lambda k: Custom(one(k), two(k)),
    ]


def plain(parts: list[Make]) -> Make:
    def make(k: int) -> Plain:
        state = Plain(parts[0](k))
        state.two = parts[-1](k)
        return state

    return make


def random_tree(draw: random.Random, depth: int, *, arrays: bool) -> Make:
    if depth == 0:
        return draw.choice(ARRAYS if arrays or draw.random() < 0.6 else OBJECTS)
    if draw.random() < 0.35:
        return draw.choice(NODES if arrays or draw.random() < 0.7 else OBJECTS)
    parts = [random_tree(draw, depth - 1, arrays=arrays) for _ in range(draw.choice([1, 2, 2, 3]))]
    return draw.choice(holders(parts) if arrays else [*holders(parts), plain(parts)])


def shape_of(value: Any) -> Any:
    """Types of containers and leaves, keys in order, and all properties of an array that `jit` uses."""
    kind = type(value)
    if isinstance(value, nnx.State):
        return kind, shape_of(value.raw_mapping)
    if isinstance(value, dict):
        return kind, [(key, shape_of(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [shape_of(part) for part in value]
    if isinstance(value, nnx.Variable):
        return kind, value.get_metadata(), shape_of(value.get_value())
    if isinstance(value, jax.Array):
        return kind, value.aval, value.committed
    if isinstance(value, (Plain, Registered, Struct, Custom)):
        return kind, [(name, shape_of(part)) for name, part in vars(value).items()]
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape
    return kind


def bits(state: Any) -> Any:
    return {
        path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in flatten(state).items()
    }


def check(make: Make) -> Any:
    saved, target = {"state": make(1)}, {"state": make(2)}
    expected, structure, before = shape_of(saved), jax.tree.structure(saved), bits(saved)
    restored = restore(target, snapshot(saved))
    assert jax.tree.structure(restored) == structure
    assert shape_of(restored) == expected
    assert bits(restored) == before
    return saved, restored


@pytest.mark.parametrize("number", range(len(NODES)))
def test_every_kind_of_node_keeps_its_structure(number: int) -> None:
    saved, _ = check(NODES[number])
    assert bits(saved) != bits({"state": NODES[number](2)}), "the control"


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_every_kind_of_object_keeps_its_structure(number: int) -> None:
    check(OBJECTS[number])


@pytest.mark.parametrize("number", range(len(holders(ARRAYS[:2]))))
def test_every_kind_of_container_keeps_its_structure(number: int) -> None:
    make = holders([ARRAYS[0], NODES[7], ARRAYS[3]])[number]
    saved, restored = check(make)
    other = holders([ARRAYS[0], NODES[7], ARRAYS[3]])[number - 1](1)
    assert shape_of(restored) == shape_of(saved) != shape_of({"state": other}), "the control"


def test_random_trees_of_all_adapters_keep_their_structure() -> None:
    kinds: collections.Counter[str] = collections.Counter()
    for seed in range(60):
        saved, _ = check(random_tree(random.Random(seed), 3, arrays=False))
        kinds.update(type(part).__name__ for part in containers(saved))
    assert {"State", "FrozenDict", "Registered", "Struct", "Custom", "Plain", "Pair"} <= set(kinds)


def containers(value: Any) -> list[Any]:
    parts: list[Any] = [value]
    if isinstance(value, (dict, nnx.State)):
        parts += [part for child in value.values() for part in containers(child)]
    elif isinstance(value, (list, tuple)):
        parts += [part for child in value for part in containers(child)]
    elif isinstance(value, (Plain, Registered, Struct, Custom)):
        parts += [part for child in vars(value).values() for part in containers(child)]
    return parts


def test_nothing_is_traced_again_after_a_restore() -> None:
    traced = 0

    @jax.jit
    def step(state: Any) -> Any:
        nonlocal traced
        traced += 1
        return state

    trees = [random_tree(random.Random(seed), 2, arrays=True) for seed in range(12)]
    for make in [*NODES, *trees]:
        saved, restored = (
            {"state": make(1)},
            restore({"state": make(2)}, snapshot({"state": make(1)})),
        )
        step(saved)
        count = traced
        step(restored)
        assert traced == count
    assert traced > len(NODES) / 2, "the control: other structures are traced"


def test_a_restored_state_works_as_a_scan_carry_and_with_optax() -> None:
    adam = optax.adam(1e-2)

    def fresh(k: int) -> Any:
        _, weights, rest = nnx.split(Net(k), nnx.Param, ...)
        return {"params": weights, "rest": rest, "opt": adam.init(weights), "lr": jnp.asarray(0.5)}

    def body(state: Any, _: Any) -> Any:
        grads = jax.tree.map(lambda p: p * state["lr"], state["params"])
        changes, opt = adam.update(grads, state["opt"])
        new = optax.apply_updates(state["params"], changes)
        return {**state, "params": new, "opt": opt}, None

    def run(state: Any, steps: int) -> Any:
        return jax.lax.scan(body, state, None, length=steps)[0]

    expected = run(fresh(1), 4)
    restored = restore(fresh(2), snapshot(run(fresh(1), 2)))
    assert bits(run(restored, 2)) == bits(expected)
    mixed = jax.tree.map(lambda a, _b: a, restored["params"], expected["params"])
    assert jax.tree.structure(mixed) == jax.tree.structure(expected["params"])


def test_the_batch_norm_of_nnx_resumes(tmp_path: Path) -> None:
    adam = optax.adam(1e-2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)), jnp.float32)
    traced = []

    def fresh() -> tuple[Any, Any]:
        graph, weights, stats, other = nnx.split(Net(0), nnx.Param, nnx.BatchStat, ...)
        return graph, {
            "params": weights, "stats": stats, "other": other, "opt": adam.init(weights)
        }  # fmt: skip

    graph, state = fresh()

    @jax.jit
    def step(state: Any) -> Any:
        traced.append(0)

        def loss(weights: Any) -> Any:
            net = nnx.merge(graph, weights, state["stats"], state["other"], copy=True)
            hidden = net.drop(net.norm(net.layers[1](net.layers[0](x))))
            return (hidden**2).sum(), nnx.state(net, nnx.BatchStat)

        grads, stats = jax.grad(loss, has_aux=True)(state["params"])
        changes, opt = adam.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], changes)
        return {**state, "params": params, "stats": stats, "opt": opt}

    with CheckpointManager(tmp_path) as manager:
        for number in range(4):
            state = step(state)
            if number == 1:
                manager.save(2, state)
    count = len(traced)
    with CheckpointManager(tmp_path) as manager:
        resumed, start = manager.restore(like=fresh()[1])
    assert jax.tree.structure(resumed) == jax.tree.structure(state)
    for _ in range(start, 4):
        resumed = step(resumed)
    assert bits(resumed) == bits(state)
    assert len(traced) == count
