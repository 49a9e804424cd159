"""Distributed datasets: where iteration starts and ends, and datasets made by a function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy_engine import NumpyEngine

from perdure import Checkpoint
from perdure.data import ArrayDataset, Prefetch
from perdure.distribute import AutoShardPolicy, InputContext, PerReplica, Strategy
from perdure.errors import ArgumentError, DataError, TopologyError

V = 3


def make_strategy(devices: int = 1, replicas: int = V, seed: int = 0) -> Strategy:
    return Strategy(NumpyEngine(devices), replicas, seed=seed)


def data() -> ArrayDataset:
    return ArrayDataset(np.arange(20.0), 6)  # 4 steps in an epoch


def rows(batches: Any) -> list[tuple[int | None, bytes]]:
    return [(b.step, b"".join(share.tobytes() for share, _ in b.values)) for b in batches]


def test_a_for_loop_runs_one_epoch_and_the_next_loop_the_next() -> None:
    strategy = make_strategy()
    every = rows(strategy.batch(data(), step) for step in range(8))
    assert [share for _, share in every[:4]] != [share for _, share in every[4:]], (
        "each epoch has its own order"
    )
    batches = strategy.distribute_dataset(data())
    assert len(batches) == batches.steps_per_epoch == 4
    assert rows(batches) == every[:4]
    assert rows(batches) == every[4:]
    assert rows(batches.epoch(1)) == every[4:]
    assert batches.step == 8


@pytest.mark.parametrize("step", [1.0, -1, True, "1", None, np.float32(1), np.int64(-1)])
def test_a_step_that_is_no_index_is_refused_by_its_name(step: Any) -> None:
    for call in (lambda: make_strategy().batch(data(), step), lambda: data().batch(step)):
        with pytest.raises(ArgumentError, match=r"^step: expected an integer from 0 to"):
            call()


def test_any_integer_is_a_step() -> None:
    strategy = make_strategy()
    steps: list[Any] = [3, np.uint8(3), np.array(3)]
    found = rows(strategy.batch(data(), step) for step in steps)
    assert found == found[:1] * 3
    assert [type(step) for step, _ in found] == [int] * 3


def test_a_resumed_loop_finishes_the_epoch_that_was_begun() -> None:
    strategy = make_strategy()
    every = rows(strategy.batch(data(), step) for step in range(8))
    batches = strategy.distribute_dataset(data())
    assert rows(batches.from_step(2)) == every[2:4]
    assert rows(batches.from_step(3).take(3)) == every[3:6]
    assert batches.step == 0
    iterator = iter(batches)
    shares = rows(next(iterator) for _ in range(3))
    assert (shares, batches.step) == (every[:3], 3)


def test_the_position_is_a_member_of_a_checkpoint(tmp_path: Any) -> None:
    strategy = make_strategy()
    batches = strategy.distribute_dataset(data())
    for batch in batches:
        if batch.step == 1:
            break
    Checkpoint(batches=batches).save(tmp_path, 2)
    other = make_strategy(3).distribute_dataset(data())
    Checkpoint(batches=other).restore(tmp_path)
    assert rows(other) == rows(batches) == rows(strategy.batch(data(), step) for step in (2, 3))


def test_a_distributed_dataset_trains_a_step() -> None:
    strategy = make_strategy()
    step = strategy.step(
        lambda _, batch, __: (batch[0] * batch[1]).sum(), lambda s, total: (s + total, total)
    )
    state = np.zeros(())
    for batch in strategy.distribute_dataset(data()):
        state, _ = step(state, batch)
    assert float(state) == sum(range(20))


def test_auto_shard_policies() -> None:
    strategy = make_strategy()
    whole = strategy.distribute_dataset(data(), AutoShardPolicy.OFF)
    expected = data().batch(0)[0].tobytes()
    assert [share.tobytes() for share, _ in next(iter(whole)).values] == [expected] * V
    assert strategy.recipe(whole)["sharded"] is False
    assert "sharded" not in strategy.recipe(strategy.distribute_dataset(data()))
    assert strategy.recipe(strategy.distribute_dataset(data())) == strategy.recipe(data())
    with pytest.raises(DataError) as error:
        strategy.distribute_dataset(data(), AutoShardPolicy.FILE)
    assert "AutoShardPolicy.FILE is refused: it deals files out to workers" in str(error.value)
    assert "Use DATA" in str(error.value)


@pytest.mark.parametrize("ahead", [False, True])
def test_without_sharding_a_batch_is_made_once(ahead: bool) -> None:
    made: list[int] = []

    class Counting(ArrayDataset):
        def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
            made.append(step)
            return super().batch(step, replica, replicas)

    examples = np.arange(20)
    source: Any = Counting(examples, 6)
    with Prefetch(source, 1) if ahead else contextlib.nullcontext(source) as dataset:
        batches = make_strategy().distribute_dataset(dataset, AutoShardPolicy.OFF)
        for batch in batches.take(4):
            first, *others = (share for share, _ in batch.values)
            first[:] = -1  # in place, as PyTorch may do; no other replica sees it
            assert all((other >= 0).all() for other in others)
    assert sorted(set(made)) == sorted(made), "no step twice"
    assert set(made) >= set(range(4))


def pipeline(context: InputContext) -> list[Any]:
    size = context.get_per_replica_batch_size(6)
    every = np.arange(24).reshape(-1, context.num_input_pipelines, size)
    return list(every[:, context.input_pipeline_id])


def stream(context: InputContext) -> Any:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(pipeline(context))

    return Stream()


@pytest.mark.parametrize("make", [pipeline, stream])
def test_a_function_makes_one_pipeline_for_each_replica(make: Any) -> None:
    results = set()
    for devices in (1, 2, 3):
        strategy = make_strategy(devices)
        made: list[InputContext] = []

        def dataset_fn(context: InputContext) -> Any:
            made.append(context)  # noqa: B023
            return make(context)

        batches = strategy.distribute_datasets_from_function(dataset_fn)
        assert made == [InputContext(V, replica, V) for replica in range(V)]
        taken = [b.values for b in batches.take(4)]
        assert np.concatenate([np.concatenate(v) for v in taken]).tolist() == list(range(24))
        results.add(np.concatenate(next(batches.from_step(2).take(1)).values).tobytes())
    assert len(results) == 1


def test_pipelines_with_a_length_have_epochs() -> None:
    batches = make_strategy().distribute_datasets_from_function(pipeline)
    assert [batch.step for batch in batches] == [0, 1, 2, 3]
    again = list(batches)
    assert [batch.step for batch in again] == [4, 5, 6, 7]
    assert np.concatenate(again[0].values).tolist() == list(range(6))


def test_unusable_pipelines_are_refused() -> None:
    strategy = make_strategy()
    make = strategy.distribute_datasets_from_function
    with pytest.raises(TopologyError) as share:
        make(lambda context: [context.get_per_replica_batch_size(20)])
    assert "a global batch of 20 does not divide into 3 logical replicas" in str(share.value)
    assert "18 and 21" in str(share.value)
    cases: list[tuple[Any, str]] = [
        (lambda _: 5, "the function gave int for logical replica 0; expected a sequence or"),
        (
            lambda context: [1] * (2 + context.input_pipeline_id // 2),
            "the pipeline of logical replica 0 has 2 batches and that of replica 2 has 3",
        ),
        (lambda _: [], "the pipelines hold no batches"),
    ]
    for fn, says in cases:
        with pytest.raises(DataError) as error:
            make(fn)
        assert says in str(error.value)
    batches = make(stream)
    with pytest.raises(DataError) as length:
        list(batches)
    assert "does not say how many steps an epoch has" in str(length.value)
    assert "use take(n)" in str(length.value)
    with pytest.raises(DataError) as end:
        list(batches.take(5))
    assert "the pipeline of logical replica 0 ended after 4 batches, and step 4" in str(end.value)
    once = make(lambda context: iter(pipeline(context)))
    list(once.take(2))
    with pytest.raises(DataError) as back:
        next(once.from_step(1).take(1))
    assert "is an iterator, which cannot go back to an earlier step" in str(back.value)
    with pytest.raises(DataError):
        batches.from_step(-1)
    with pytest.raises(DataError) as recipe:
        strategy.recipe(batches)
    assert 'distribute_datasets_from_function(fn, recipe={"dataset": ' in str(recipe.value)


def test_a_function_with_a_fingerprint_has_a_recipe() -> None:
    strategy = make_strategy(seed=3)
    named = {"dataset": "numbers", "batch_size": 6, "seed": 9}
    batches = strategy.distribute_datasets_from_function(pipeline, named)
    expected = {**strategy.recipe(), "dataset": "numbers", "batch_size": 6, "data_seed": 9}
    assert strategy.recipe(batches) == strategy.recipe(batches.from_step(2)) == expected


def test_pipelines_of_other_lengths_in_another_process_are_refused() -> None:
    class Two:
        index, count, is_chief = 0, 2, True

        def gather(self, data: bytes) -> list[bytes]:
            return [data, msgspec.msgpack.encode(9)]

        def agree(self, data: bytes, decide: Any) -> bytes:
            return decide([data, data])  # one recipe

    engine: Any = NumpyEngine(1)
    engine.processes, engine.devices_per_process = Two(), (1, 1)
    with pytest.raises(DataError) as error:
        Strategy(engine, V).distribute_datasets_from_function(pipeline)
    assert "an epoch has 4 steps in process 0 and 9 in process 1" in str(error.value)


def test_distribute_values_from_function() -> None:
    values = make_strategy(2).distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    assert values == PerReplica(((0, V), (1, V), (2, V)), (0, 1, 2))
