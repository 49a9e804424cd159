"""A batch is a function of the step; an epoch holds every example once, whatever the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from messages import unnamed
from perdure.data import ArrayDataset
from perdure.errors import ArgumentError, DataError, TopologyError

N = 103


def dataset(**kwargs: Any) -> ArrayDataset:
    return ArrayDataset({"x": np.arange(N) * 10, "n": np.arange(N)}, 24, **kwargs)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_once_per_epoch(replicas: int, shuffle: bool) -> None:
    data = dataset(shuffle=shuffle, seed=4)
    for epoch in (0, 1):
        seen: list[int] = []
        for step in range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch):
            for replica in range(replicas):
                batch = data.batch(step, replica, replicas)
                assert len(batch["x"]) == 24 // replicas
                assert (batch["x"] == batch["n"] * 10).all()
                seen += batch["n"][batch["weight"] == 1].tolist()
        assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_hold_contiguous_rows_of_the_same_batch(replicas: int) -> None:
    data = dataset()
    for step in range(12):
        parts = [data.batch(step, replica, replicas) for replica in range(replicas)]
        for name, whole in data.batch(step).items():
            assert np.concatenate([part[name] for part in parts]).tobytes() == whole.tobytes()


def test_steps_may_come_in_any_order() -> None:
    forward = [dataset().batch(step)["n"].tolist() for step in range(20)]
    data = dataset()
    backward = [data.batch(step)["n"].tolist() for step in reversed(range(20))]
    assert forward == backward[::-1]


def test_every_epoch_and_seed_has_its_own_order() -> None:
    data = dataset()
    per_epoch = data.steps_per_epoch
    assert per_epoch == 5
    assert data.epoch(7) == (1, 2)
    first = data.batch(0)["n"].tolist()
    assert first != data.batch(per_epoch)["n"].tolist()
    assert first != dataset(seed=1).batch(0)["n"].tolist()
    assert dataset(shuffle=False).batch(0)["n"].tolist() == list(range(24))


def test_the_last_batch_is_padded_with_weight_0() -> None:
    data = dataset()
    index, weight = data.indices(4)
    assert weight.dtype == np.float32
    assert weight.tolist() == [1.0] * 7 + [0.0] * 17
    assert index[7:].tolist() == data.indices(0)[0][:17].tolist()


def test_a_batch_larger_than_the_dataset_is_padded_more_than_once() -> None:
    index, weight = ArrayDataset(np.arange(3), 8, shuffle=False).indices(0)
    assert index.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert weight.sum() == 3


def test_drop_remainder_leaves_out_the_incomplete_batch() -> None:
    data = dataset(drop_remainder=True)
    assert data.steps_per_epoch == 4
    assert all((data.indices(step)[1] == 1).all() for step in range(8))


def test_a_tuple_and_a_single_array_get_the_weight_last() -> None:
    x, y, weight = ArrayDataset((np.arange(4), np.arange(4) + 1), 4).batch(0)
    assert (y == x + 1).all()
    assert weight.tolist() == [1] * 4
    x, weight = ArrayDataset(np.arange(4), 4).batch(0)
    assert sorted(x) == [0, 1, 2, 3]


def test_fingerprint_sees_names_dtypes_shapes_and_bytes() -> None:
    x = np.arange(8, dtype=np.int32)
    variants: list[Any] = [
        {"x": x}, {"y": x}, {"x": x.astype(np.int64)}, {"x": x.reshape(4, 2)}, {"x": x[::-1]},
        {"x": x.view(np.float32)}, {"x": x, "y": x}, (x,),
    ]  # fmt: skip
    prints = [ArrayDataset(variant, 2).fingerprint for variant in variants]
    assert len(set(prints)) == len(prints)
    assert ArrayDataset({"x": x.copy()}, 4, seed=9).fingerprint == prints[0]


def test_the_recipe_has_what_decides_the_batches() -> None:
    data = dataset(seed=5)
    assert data.recipe() == {
        "dataset": data.fingerprint,
        "examples": N,
        "batch_size": 24,
        "seed": 5,
        "shuffle": True,
        "drop_remainder": False,
    }


def test_a_batch_that_does_not_divide_names_the_sizes_that_do() -> None:
    with pytest.raises(TopologyError) as error:
        dataset().batch(0, 0, 7)
    assert not unnamed(error.value, "batch of 24", "7 logical replicas", "21 and 28")
    with pytest.raises(TopologyError) as error:
        dataset().batch(0, 0, 32)
    assert str(error.value).endswith("that do: 32")
    with pytest.raises(TopologyError):
        dataset().batch(0, 8, 8)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "found none"),
        ({"x": np.zeros((0, 2))}, "found x: 0"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "x: 3, y: 4"),
        ({"x": np.zeros(3), "weight": np.zeros(3)}, '"weight"'),
        (np.float32(1), "found float32[]"),
        (np.array([object()]), "found object[1]"),
        ({1: np.zeros(3)}, "expected strings, found 1"),
    ],
)
def test_arrays_that_are_refused(arrays: Any, says: str) -> None:
    with pytest.raises(DataError) as error:
        ArrayDataset(arrays, 1)
    assert says in str(error.value)


def test_bad_batch_sizes_and_steps_are_refused() -> None:
    with pytest.raises(DataError) as error:
        ArrayDataset(np.zeros(3), 4, drop_remainder=True)
    assert "leaves no batch" in str(error.value)
    with pytest.raises(DataError):
        ArrayDataset(np.zeros(3), 0)
    with pytest.raises(ArgumentError, match="step"):
        dataset().batch(-1)
