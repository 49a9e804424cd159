"""The strategy on a NumPy engine: what it calls, in which order, and what it refuses."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy_engine import NumpyEngine

from messages import unnamed
from perdure.data import ArrayDataset
from perdure.distribute import AutoShardPolicy, PerReplica, Strategy
from perdure.distribute.engine import Stream
from perdure.errors import ArgumentError, DataError, StateError, TopologyError

V = 6


def make_strategy(devices: int = 1, replicas: int | None = V, seed: int = 0) -> Strategy:
    return Strategy(NumpyEngine(devices), replicas, seed=seed)


def dataset(batch: int = 2 * V) -> ArrayDataset:
    return ArrayDataset({"x": np.random.default_rng(0).normal(size=(50, 3))}, batch)


def grad(state: Any, batch: Any, key: Any) -> Any:
    noise = key.normal(size=3)
    weighted = (batch["x"] * state["w"] + noise) * batch["weight"][:, None]
    return {"w": weighted.sum(0), "loss": (weighted.sum(), batch["weight"].sum())}


def update(state: Any, total: Any) -> Any:
    loss, weight = total["loss"]
    return {"w": state["w"] - 0.1 * total["w"] / weight}, {"loss": loss / weight}


def train(strategy: Strategy) -> bytes:
    state, train_step, data = {"w": np.ones(3)}, strategy.step(grad, update), dataset()
    logs: Any = None
    for step in range(7):
        state, logs = train_step(state, strategy.batch(data, step))
    return state["w"].tobytes() + logs["loss"].tobytes()


def test_one_result_for_any_number_of_devices() -> None:
    assert len({train(make_strategy(devices)) for devices in range(1, V + 1)}) == 1


def test_seed_and_replicas_are_in_the_result() -> None:
    results = [
        train(make_strategy()),
        train(make_strategy(seed=1)),
        train(make_strategy(replicas=3)),
    ]
    assert len(set(results)) == 3


@pytest.mark.parametrize("devices", [1, 4])
def test_each_replica_and_each_device_is_used_once(devices: int) -> None:
    strategy = make_strategy(devices, seed=5)
    engine: Any = strategy._engine
    strategy.step(grad, update)({"w": np.ones(3)}, strategy.batch(dataset(), 3))
    streams = [stream for verb, stream in engine.calls if verb == "grad"]
    assert sorted(streams) == [Stream(5, 3, replica) for replica in range(V)]
    verbs = [verb for verb, _ in engine.calls]
    assert verbs.count("add") == V - 1
    assert verbs[-devices:] == ["update"] * devices


def test_recipe_is_flat_json_without_topology() -> None:
    recipe = make_strategy(seed=4).recipe(dataset())
    assert json.loads(json.dumps(recipe)) == recipe
    assert {"replicas": V, "seed": 4, "tree": 3, "engine": "numpy", "data_seed": 0}.items() <= (
        recipe.items()
    )
    assert all(isinstance(value, (str, int, float, bool)) for value in recipe.values())
    assert make_strategy(3, seed=4).recipe(dataset()) == recipe


def test_replicas_default_to_the_devices() -> None:
    assert make_strategy(3, None).num_replicas_in_sync == 3
    strategy = make_strategy(3)
    assert (strategy.num_replicas_in_sync, strategy.local_replicas) == (V, tuple(range(V)))
    assert strategy.is_chief
    assert strategy.processes.count == 1


def test_run_splits_per_replica_values_and_passes_other_arguments() -> None:
    strategy = make_strategy(2)
    batch = strategy.batch(dataset(), 0)
    out = strategy.run(
        lambda b, _, *, plus: b["x"].sum() + plus, (batch, strategy.keys(0)), {"plus": 1}
    )
    assert out.values == tuple(share["x"].sum() + 1 for share in batch.values)
    assert strategy.local_results(out) == out.values
    assert strategy.local_results(5) == (5,)


def test_reduce_has_the_same_bits_on_any_devices() -> None:
    class Pair(NamedTuple):
        total: Any
        weight: Any

    results = []
    for devices in (1, 2, 4, V):
        strategy = make_strategy(devices)
        values = strategy.run(lambda key: key.normal(size=(2, 3)), (strategy.keys(1),))
        results.append(
            (
                strategy.reduce("sum", values).tobytes(),
                strategy.reduce("MEAN", values).tobytes(),
                strategy.reduce("sum", values, axis=0).tobytes(),
                strategy.reduce("mean", values, axis=1).tobytes(),
            )
        )
    assert len(set(results)) == 1
    strategy = make_strategy(2)
    ones = PerReplica(tuple(np.ones((2, 3)) * r for r in range(V)), strategy.local_replicas)
    assert strategy.reduce("sum", ones, axis=0).tolist() == [30.0] * 3
    assert strategy.reduce("mean", ones, axis=0).tolist() == [2.5] * 3
    assert strategy.reduce("mean", ones).tolist() == [[2.5] * 3] * 2
    pairs = PerReplica(tuple(Pair(float(r), 2) for r in range(V)), strategy.local_replicas)
    assert strategy.reduce("sum", pairs) == Pair(15.0, 12)


def test_a_replica_with_another_structure_is_named_with_the_paths() -> None:
    strategy = make_strategy(3)
    odd = [{"a": np.ones(2), "b": (1.0,)} for _ in range(V)]
    odd[4] = {"a": np.ones(3), "c": 1.0}  # type: ignore[dict-item]
    with pytest.raises(StateError) as error:
        strategy.reduce("sum", PerReplica(tuple(odd), strategy.local_replicas))
    assert not unnamed(
        error.value,
        "another structure",
        "a: float64[2] in replica 0, float64[3] in replica 4",
        "b/0: float64[] in replica 0, nothing in replica 4",
        "c: nothing in replica 0, float64[] in replica 4",
    )

    calls = []

    def uneven(state: Any, batch: Any, key: Any) -> Any:
        calls.append(key)
        return {"w": np.ones(3)} if len(calls) != 3 else {"w": np.ones(3), "extra": np.ones(1)}

    strategy = make_strategy(1)
    with pytest.raises(StateError) as error:
        strategy.step(uneven, update)({"w": np.ones(3)}, strategy.batch(dataset(), 0))
    assert "extra: nothing in replica 0, float64[1] in replica 2" in str(error.value)


def test_a_batch_that_v_does_not_divide_is_refused() -> None:
    with pytest.raises(TopologyError) as error:
        make_strategy().batch(dataset(20), 0)
    assert "a global batch of 20 does not divide into 6 logical replicas" in str(error.value)
    assert "18 and 24" in str(error.value)


def test_more_devices_than_replicas_are_refused() -> None:
    with pytest.raises(TopologyError) as error:
        make_strategy(V + 1)
    assert "6 logical replicas cannot occupy 7 devices" in str(error.value)
    assert "Use at most 6 devices" in str(error.value)


def test_values_of_other_types_and_strategies_are_refused() -> None:
    strategy = make_strategy()
    train_step = strategy.step(grad, update)
    for batch in ({"x": 1}, strategy.run(lambda: 1), make_strategy(replicas=3).batch(dataset(), 0)):
        with pytest.raises(TopologyError) as error:
            train_step({"w": np.ones(3)}, batch)  # type: ignore[arg-type]
        assert "expect" in str(error.value)
    with pytest.raises(TopologyError):
        strategy.run(lambda key: key, (make_strategy(replicas=3).keys(0),))
    with pytest.raises(TopologyError) as error:
        strategy.reduce("max", strategy.keys(0))
    assert '"sum" or "mean"' in str(error.value)
    with pytest.raises(TopologyError):
        strategy.reduce("sum", np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        strategy.batch(dataset(), -1)
    with pytest.raises(TopologyError):
        make_strategy(seed=-1)
    with pytest.raises(ValueError, match="one value for each"):
        PerReplica((1,), (0, 1))


def test_a_mean_over_an_axis_is_over_all_elements() -> None:
    strategy = Strategy(NumpyEngine(2), 2)
    for parts in ([[1.0, 2.0, 6.0], [5.0]], [[5.0], [1.0, 2.0, 6.0]]):
        values = PerReplica(tuple(map(np.array, parts)), strategy.local_replicas)
        assert strategy.reduce("mean", values, axis=0) == 3.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": "4"}, "replicas: expected an integer, or None for the devices, found '4'"),
        ({"replicas": 2.0}, "replicas: expected an integer"),
        ({"replicas": True}, "replicas: expected an integer"),
        ({"seed": 1.5}, "seed: expected an integer"),
        ({"seed": None}, "seed: expected an integer"),
    ],
)
def test_arguments_of_another_type_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        make_strategy(**given)


def test_objects_that_are_no_dataset_or_no_tuple_are_refused() -> None:
    strategy: Any = make_strategy()
    for wrong in (
        lambda: strategy.batch([1, 2], 0),
        lambda: strategy.distribute_dataset([1, 2]),
        lambda: strategy.recipe(([1, 2], [3])),
    ):
        with pytest.raises(
            DataError, match="expected a dataset, which gives the batch of any step, f"
        ):
            wrong()
    with pytest.raises(DataError, match="FILE is refused"):
        strategy.distribute_dataset(dataset(), "FILE")
    with pytest.raises(DataError, match="auto_shard_policy: expected DATA or OFF, found 'BATCH'"):
        strategy.distribute_dataset(dataset(), "BATCH")
    with pytest.raises(
        TopologyError, match=r"args: expected a tuple of arguments, found PerReplica"
    ):
        strategy.run(print, args=strategy.batch(dataset(), 0))


def test_policies_may_be_given_by_name() -> None:
    strategy = make_strategy()
    by_name = next(iter(strategy.distribute_dataset(dataset(), "off")))
    by_value = next(iter(strategy.distribute_dataset(dataset(), AutoShardPolicy.OFF)))
    for one, other in zip(by_name.values, by_value.values, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])
        assert len(one["x"]) == 2 * V


def test_results_of_replicas_are_unpacked_as_in_tensorflow() -> None:
    strategy = make_strategy(2, replicas=3)
    batch = strategy.batch(ArrayDataset({"x": np.arange(3.0)}, 3, shuffle=False), 0)

    def step(share: Any) -> tuple[Any, dict[str, Any]]:
        return share["x"].sum(), {"double": 2 * share["x"].sum()}

    loss, logs = strategy.run(step, args=(batch,))
    assert strategy.local_results(loss) == (0.0, 1.0, 2.0)
    assert strategy.local_results(logs["double"]) == (0.0, 2.0, 4.0)
    assert strategy.reduce("sum", logs["double"]) == 6.0
    assert batch["x"].step == 0
    assert strategy.local_results(strategy.run(step, args=(batch,))[0]) == (0.0, 1.0, 2.0)
    # An array of two numbers is not a pair; rows must not be mistaken for replicas.
    arrays = strategy.run(lambda _: np.zeros(2), args=(batch,))
    with pytest.raises(TypeError, match="local_results"):
        _, _ = arrays
    with pytest.raises(TypeError, match="local_results"):
        arrays[0]
    with pytest.raises(TypeError, match="expected tuples of one length"):
        list(PerReplica(((1, 2), (1,)), (0, 1)))
    with pytest.raises(ValueError, match="not enough values"):
        _, _, _ = strategy.run(step, args=(batch,))
