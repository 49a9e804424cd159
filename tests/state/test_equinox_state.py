"""Equinox: readable paths, functions that stay code, stateful layers, partitioned and whole modules."""

from __future__ import annotations

import dataclasses
import functools
import operator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from perdure import Checkpoint, CheckpointManager, MemoryStorage
from perdure.data import ArrayDataset
from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.jax import MirroredStrategy
from perdure.state import flatten, restore


class Net(eqx.Module):
    layers: list[Any]
    norm: eqx.nn.BatchNorm
    steps: int
    name: str = eqx.field(static=True)

    def __init__(self, seed: int, width: int = 8) -> None:
        one, two = jax.random.split(jax.random.key(seed))
        self.layers = [
            eqx.nn.Linear(4, width, key=one),
            jax.nn.relu,
            eqx.nn.Linear(width, 2, use_bias=False, key=two),
        ]
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema", channelwise_affine=False)
        self.steps = seed
        self.name = f"net {seed}"


def bits(state: Any) -> dict[str, Any]:
    return {
        path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in flatten(state).items()
    }


def test_paths_are_the_names_of_the_fields() -> None:
    net, state = eqx.nn.make_with_state(Net)(0)
    assert list(flatten({"net": net, "state": state})) == [
        "net/layers/0/weight",
        "net/layers/0/bias",
        "net/layers/2/weight",
        "net/norm/axis_name",
        "net/norm/inference",
        "net/steps",
        "state/Net.norm.ema_first_time_index",
        "state/Net.norm.ema_state_index/0",
        "state/Net.norm.ema_state_index/1",
    ]


def test_a_restored_module_has_the_saved_arrays_and_numbers_and_the_targets_functions() -> None:
    source, target = eqx.nn.make_with_state(Net)(3), eqx.nn.make_with_state(Net)(4)
    assert bits(source) != bits(target)
    net, state = restore(target, flatten(source))
    assert bits((net, state)) == bits(source)
    assert net.layers[1] is jax.nn.relu
    assert (net.steps, net.name) == (3, "net 4")
    # The restored module works: the stateful layer finds its state.
    assert state.get(net.norm.ema_first_time_index).dtype == bool


def test_a_partitioned_module_has_the_paths_of_the_whole_one() -> None:
    net, _ = eqx.nn.make_with_state(Net)(0)
    params, static = eqx.partition(net, eqx.is_array)
    leaves = flatten(params)
    assert list(leaves) == [path for path, leaf in flatten(net).items() if not leaf.is_scalar]
    again = eqx.combine(restore(jax.tree.map(jnp.zeros_like, params), leaves), static)
    assert bits(again) == bits(net)


def test_differences_are_listed_by_path() -> None:
    with pytest.raises(MismatchError) as caught:
        restore(eqx.nn.make_with_state(Net)(0, 9)[0], flatten(eqx.nn.make_with_state(Net)(0)[0]))
    assert "layers/0/weight: expected float32[9,4], found float32[8,4]" in str(caught.value)
    assert "layers/2/weight: expected float32[2,9], found float32[2,8]" in str(caught.value)


def test_a_field_that_is_neither_state_nor_code_is_refused() -> None:
    class Holder(eqx.Module):
        thing: Any

    with pytest.raises(UnsupportedLeafError) as caught:
        flatten({"model": Holder(object())})
    assert str(caught.value).startswith("model/thing: a value of type builtins.object")


def test_a_checkpoint_of_a_strategy_restores_a_module_without_one(tmp_path: Any) -> None:
    params, static = eqx.partition(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)), eqx.is_array)
    adam = optax.adam(1e-2)
    data = ArrayDataset({"x": np.ones((32, 4), np.float32)}, 16)
    strategy = MirroredStrategy(1, 4)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            model = eqx.combine(params, static)
            return (jax.vmap(model)(batch["x"]).sum(-1) * batch["weight"]).sum()

        return {"grads": jax.grad(loss)(state["model"]), "weight": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        grads = jax.tree.map(lambda g: g / total["weight"], total["grads"])
        changes, opt = adam.update(grads, state["opt"], state["model"])
        return {"model": eqx.apply_updates(state["model"], changes), "opt": opt}, None

    state: Any = {"model": params, "opt": adam.init(params)}
    train_step = strategy.step(grad, update)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        for step in range(2):
            state, _ = train_step(state, strategy.batch(data, step))
        manager.save(2, state)
    fresh = eqx.filter(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(9)), eqx.is_array)
    checkpoint = Checkpoint(model=fresh, opt=adam.init(fresh))
    assert checkpoint.restore(tmp_path) == 2
    assert bits(checkpoint) == bits(state)
    assert bits(eqx.combine(checkpoint.model, static)) != bits(eqx.combine(params, static))


def test_a_whole_module_in_a_strategy_is_refused_with_eqx_partition() -> None:
    strategy = MirroredStrategy(1, 1)
    train_step = strategy.step(
        lambda _state, _batch, _key: {"x": 1.0}, lambda state, _total: (state, None)
    )
    data = ArrayDataset({"x": np.ones((4, 4), np.float32)}, 4)
    with pytest.raises(StateError) as caught:
        train_step(Net(0), strategy.batch(data, 0))
    assert "layers/1" in str(caught.value)
    assert "(eqx.partition)" in str(caught.value)


class ModuleOfNnx(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        self.deep = nnx.List([nnx.Dropout(0.5)])
        self.scale = 1.0


@jax.tree_util.register_pytree_node_class
class Registered:
    def __init__(self, weight: Any, name: str) -> None:
        self.weight, self.name = weight, name

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.weight,), (jnp.tanh, self.name)

    @classmethod
    def tree_unflatten(cls, auxiliary: Any, children: Any) -> Registered:
        (weight,) = children
        return cls(weight, auxiliary[1])


@dataclasses.dataclass
class Declared:
    weight: Any
    name: str


jax.tree_util.register_dataclass(Declared, data_fields=["weight"], meta_fields=["name"])


class Static(eqx.Module):
    weight: jax.Array
    inner: list[Any]
    scale: float = eqx.field(static=True)


def static_state() -> dict[str, Any]:
    inner = Static(jnp.ones(1), [], 1.0)
    return {
        "net": ModuleOfNnx(),
        "static": Static(jnp.ones(1), [inner], 1.0),
        "registered": Registered(jnp.ones(2), "a"),
        "declared": Declared(jnp.ones(2), "a"),
    }


@pytest.mark.parametrize("is_resumed", [False, True])
def test_static_values_that_a_run_has_changed_are_restored(
    tmp_path: Path, is_resumed: bool
) -> None:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(static_state())
        state["net"].scale *= 0.5
        state["net"].deep[0].rate = 0.25
        state["net"].eval()
        inner = Static(jnp.zeros(1), [], 0.25)
        state["static"] = Static(jnp.zeros(1), [inner], 0.5)
        state["registered"] = Registered(jnp.zeros(2), "b")
        state["declared"] = Declared(jnp.zeros(2), "b")
        manager.save(1, state)
    if is_resumed:
        with CheckpointManager(tmp_path, recipe={}) as manager:
            state, _ = manager.restore_or_initialize(static_state())
            manager.save(2, state)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        target = static_state()
        state, _ = manager.restore_or_initialize(target)
    assert state["net"].scale == 0.5
    assert state["net"].deep[0].rate == 0.25
    assert not state["net"].deep[0].deterministic  # the program sets the mode itself
    static = state["static"]
    assert (static.scale, static.inner[0].scale) == (0.5, 0.25)
    assert (state["registered"].name, state["declared"].name) == ("b", "b")
    assert target["static"].scale == 1.0  # the restore has made new ones


def test_static_values_that_no_step_has_changed_are_those_of_the_target(tmp_path: Path) -> None:
    """Negative control of the test above."""
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, static_state())
        manager.wait_until_finished()
        like = static_state()
        like["net"].scale = 3.0
        assert manager.restore(like=like).state["net"].scale == 3.0


@flax.struct.dataclass
class Chosen:
    value: jax.Array
    rule: Any = flax.struct.field(pytree_node=False, default=None)


@pytest.mark.parametrize("rule", [lambda x: x, functools.partial(max, 0), jax.nn.relu])
def test_a_static_value_without_an_exact_form_is_refused(rule: Any) -> None:
    state = {"chosen": Chosen(jnp.zeros(1), jnp.abs), "other": Chosen(jnp.zeros(1), dict.fromkeys)}
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize(state)
        manager.save(1, {**state, "other": Chosen(jnp.zeros(1), dict.fromkeys)})  # equal, as to JAX
        state["chosen"] = state["chosen"].replace(rule=rule)
        with pytest.raises(
            UnsupportedLeafError, match="chosen/rule: the run has changed this static"
        ):
            manager.save(2, state)


class Changing(eqx.Module):
    weight: Any
    ema: Any = None
    history: Any = ()
    rule: Any = jnp.tanh
    call: Any = jax.tree_util.Partial(jnp.add, 1.0)


class Pair(NamedTuple):
    net: Any
    steps: int = 0


ONES = jnp.ones(2)
HOLDERS: list[Any] = [
    lambda net: {"net": net},
    lambda net: (net, 1),
    lambda net: Pair(net),
    lambda net: Chosen(net),
    lambda net: Checkpoint(net=net),
    lambda net: net,
]
MODULE = {"weight": ONES, "history": [ONES, ONES]}
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ema", {}, {"ema": ONES}),
    ("ema", {}, {"ema": 3}),
    ("ema", {}, {"ema": {"a": ONES}}),
    ("ema", {"ema": {"a": ONES, "b": None}}, {"ema": {"b": None, "c": ONES}}),
    ("history", {}, {"history": (ONES, 2)}),
    ("history", {}, {"history": []}),
    ("history", {"history": [ONES]}, {"history": [ONES, ONES]}),
    ("history", MODULE, {"history": [ONES]}),
    ("history", MODULE, {"history": (ONES, ONES)}),
    ("weight", {}, {"weight": None}),
    ("rule", {}, {"rule": jnp.sin}),
    ("rule", {}, {"rule": None}),
    ("rule", {}, {"rule": ONES}),
    ("history", {"history": [jnp.tanh]}, {"history": [jnp.sin]}),
    ("call", {}, {"call": jax.tree_util.Partial(jnp.multiply, 1.0)}),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("name", "first", "now"), CHANGES)
def test_another_structure_or_function_of_a_module_is_refused(
    name: str, first: dict[str, Any], now: dict[str, Any], late: bool
) -> None:
    """No leaf says it, and a restore makes the module as the target has it."""
    first = {"weight": ONES, **first}
    for holds in HOLDERS:
        with CheckpointManager(MemoryStorage(), recipe={}) as manager:
            state, _ = manager.restore_or_initialize(holds(Changing(**first)))
            if late:
                manager.save(1, state)
            with pytest.raises(UnsupportedLeafError) as caught:
                manager.save(2, holds(Changing(**{**first, **now})))
            path = str(caught.value).partition(":")[0]
            assert name in path or path in {"net", "0", "value", "(the state itself)"}


@pytest.mark.parametrize("number", range(len(HOLDERS)))
def test_a_module_with_the_same_structure_and_functions_is_resumed(number: int) -> None:
    """Negative control of the test above."""
    holds, storage = HOLDERS[number], MemoryStorage()
    add = jax.tree_util.Partial(jnp.add, 2.0)
    fresh = Changing(ONES, history=[1.0, jnp.abs, {"a": ONES}])
    trained = Changing(ONES * 3, history=[jnp.float32(2), jnp.abs, {"a": ONES * 4}], call=add)
    with CheckpointManager(storage, recipe={}) as manager:
        manager.restore_or_initialize(holds(fresh))
        for step, now in enumerate([fresh, trained], 1):
            manager.save(step, holds(now))
    with CheckpointManager(storage, recipe={}) as manager:
        state, step = manager.restore_or_initialize(holds(fresh))
    assert step == 2
    assert bits(state) == bits(holds(trained)) != bits(holds(fresh))


def test_another_function_of_a_partial_is_refused() -> None:
    partial = jax.tree_util.Partial
    storage = MemoryStorage()
    for function in (jnp.add, jnp.multiply):
        with CheckpointManager(storage, recipe={}) as manager:
            fresh = {"loss": partial(jnp.add, ONES)}
            state, step = manager.restore_or_initialize(fresh)
            state = {"loss": partial(function, state["loss"].args[0] * 3)}
            if function is jnp.add:
                manager.save(step + 1, state)
                continue
            assert bits(fresh) != bits(state)
            with pytest.raises(UnsupportedLeafError, match="loss/func: this was another function"):
                manager.save(step + 1, state)


class Growing(nnx.Module):
    def __init__(self) -> None:
        self.a = nnx.Param(ONES)
        self.blocks = nnx.List([nnx.Param(ONES), jnp.tanh])
        self.extra = nnx.data(None)
        self.rule = jnp.tanh


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("net/rule", lambda net: setattr(net, "rule", jnp.sin)),
        ("net/blocks/1", lambda net: operator.setitem(net.blocks, 1, jnp.sin)),
        ("net/extra", lambda net: setattr(net, "extra", ONES)),
        ("net/lora", lambda net: setattr(net, "lora", nnx.Param(ONES))),
        ("net/blocks/2", lambda net: net.blocks.append(nnx.Param(ONES))),
    ],
)
def test_what_a_module_of_nnx_gets_is_refused_with_its_path(path: str, change: Any) -> None:
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"net": Growing()})
        manager.save(1, state)
        change(state["net"])
        with pytest.raises(UnsupportedLeafError, match=f"^{path}: "):
            manager.save(2, state)


@pytest.mark.parametrize("first", [None, 3, [], {}])
def test_a_registered_node_without_names_is_refused_in_the_place_of_a_value(first: Any) -> None:
    node: Any = Registered(ONES, "a")
    now = [node] if first == [] else {"a": node} if first == {} else node
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"best": first, "node": node})
        with pytest.raises(UnsupportedLeafError, match=r"^best[^:]*: there was .*Make each"):
            manager.save(1, {"best": now, "node": node})
