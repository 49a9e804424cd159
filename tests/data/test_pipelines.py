"""Pipelines of other libraries, whose `batch` is not `batch(step)`: accepted or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from perdure.data import Prefetch
from perdure.errors import DataError
from perdure.torch import MirroredStrategy
from perdure.train import RunConfig, Trainer
from perdure.train.batch_source import evaluation_batches, open_source

ROWS = [np.full(2, number, np.float32) for number in range(24)]


class Pipeline:
    """The part of `tf.data.Dataset` that matters to these tests: `batch` returns another pipeline."""

    def batch(self, size: int) -> Pipeline:
        raise AssertionError(f"batch({size}) was called as if it gave the batch of a step")

    def map(self, function: Callable[[Any], Any]) -> Pipeline:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def map_dataset() -> Any:
    return grain.MapDataset.source(ROWS).seed(3).shuffle()


def iter_dataset() -> Any:
    return map_dataset().batch(8).to_iter_dataset(grain.ReadOptions(1, 1))


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (Pipeline, "StreamDataset"),
        (lambda: map_dataset().batch(8), "perdure.data.Dataset(map_dataset"),
        (iter_dataset, "perdure.data.Dataset(map_dataset"),
    ],
    ids=["tf.data", "MapDataset", "IterDataset"],
)
def test_a_strategy_refuses_pipelines_by_name(make: Callable[[], Any], advice: str) -> None:
    strategy = MirroredStrategy(replicas=2)
    data = make()
    uses: list[Callable[[], object]] = [
        lambda: strategy.batch(data, 0),
        lambda: strategy.recipe(data),
        lambda: strategy.distribute_dataset(data),
        lambda: open_source(data, strategy),
        lambda: Prefetch(data),
    ]
    for use in uses:
        with pytest.raises(DataError) as error:
            use()
        assert type(data).__qualname__ in str(error.value)
        assert advice in str(error.value)


def test_a_trainer_refuses_a_pipeline_that_has_no_position(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sets a batch size"):
        Trainer(lambda state, _: (state, {}), {}, Pipeline(), RunConfig(tmp_path))


def test_a_pipeline_is_evaluated_from_its_start() -> None:
    assert [float(row[0]) for row in evaluation_batches(Pipeline(), 3)] == [0.0, 1.0, 2.0]
    assert len(list(evaluation_batches(iter_dataset(), None))) == 3


def resumed(make: Callable[[], Any], model_dir: Path, stops: tuple[int, ...]) -> list[bytes]:
    """The batches that a Trainer without a strategy trained on, started again after each stop."""
    seen: list[bytes] = []

    def step(state: Any, batch: Any) -> Any:
        seen.append(np.asarray(batch).tobytes())
        return {"count": state["count"] + 1}, {}

    for stop in stops:
        config = RunConfig(model_dir, save_checkpoints_steps=1)
        Trainer(step, {"count": 0}, make(), config).train(stop)
    return seen


@pytest.mark.parametrize("make", [lambda: map_dataset().batch(8), iter_dataset])
def test_a_trainer_accepts_batches_of_grain(make: Callable[[], Any], tmp_path: Path) -> None:
    whole = resumed(make, tmp_path / "whole", (3,))
    assert len(set(whole)) == 3
    assert resumed(make, tmp_path / "parts", (1, 2, 3)) == whole


def test_each_epoch_of_a_map_dataset_has_its_own_order(tmp_path: Path) -> None:
    batches = resumed(lambda: map_dataset().batch(8), tmp_path / "run", (2, 6))
    rows = [[row for batch in epoch for row in batch] for epoch in (batches[:3], batches[3:])]
    assert batches[:3] != batches[3:]
    assert sorted(rows[0]) == sorted(rows[1])


def test_a_batch_that_a_filter_dropped_is_an_error() -> None:
    data = map_dataset().batch(8).filter(lambda batch: batch.sum() < 0)
    with pytest.raises(DataError, match="Filter the examples"):
        open_source(data).fetch(0)
