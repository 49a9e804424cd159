"""A `tf.data` pipeline over arrays is a source by index: exact, and with TensorFlow's examples."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import ArrayDataset, RunConfig, Trainer, load_checkpoint
from perdure.data.pipelines import by_index
from perdure.errors import DataError
from perdure.torch import OneDeviceStrategy
from perdure.train import Hook

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")


class _TensorFlow:
    """Imported by the process that runs these tests, not by each that collects them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("tensorflow"), name)


tf: Any = _TensorFlow()


@pytest.fixture(autouse=True)
def no_global_seed() -> None:
    """Keras's `set_random_seed` in another test sets TensorFlow's, which decides the orders, too."""
    tf.random.set_seed(None)


X = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
Y = np.arange(22)


def pipeline(arrays: Any = (X, Y)) -> Any:
    return tf.data.Dataset.from_tensor_slices(arrays)


def test_without_a_shuffle_the_batches_are_those_of_tensorflow() -> None:
    for arrays in ((X, Y), {"y": Y, "x": X}, X):
        made = by_index(pipeline(arrays).batch(8).prefetch(2))
        for step, theirs in enumerate(pipeline(arrays).batch(8).as_numpy_iterator()):
            ours = made.batch(step)
            flat = ours.values() if isinstance(ours, dict) else ours
            named = [*theirs.values()] if isinstance(theirs, dict) else theirs
            named = named if isinstance(named, (list, tuple)) else [named]
            *leaves, weight = flat
            rows = int(weight.sum())
            expected = dict(zip(theirs, named, strict=True)) if isinstance(theirs, dict) else None
            found = {k: ours[k] for k in expected} if expected else dict(enumerate(leaves))
            for key, array in (expected or dict(enumerate(named))).items():
                assert found[key][:rows].tobytes() == array.tobytes()
                assert found[key].dtype == array.dtype
    assert made.epochs == 1


def test_a_shuffle_is_the_order_of_an_array_dataset_with_its_seed() -> None:
    made = by_index(pipeline().shuffle(22, seed=3).batch(8, drop_remainder=True).repeat())
    expected = ArrayDataset((X, Y), 8, seed=3, drop_remainder=True)
    assert made.recipe() == expected.recipe()
    assert made.epochs is None
    for step in range(5):
        assert made.batch(step)[1].tolist() == expected.batch(step)[1].tolist()
    epoch = np.concatenate([made.batch(step)[1] for step in range(2)])
    assert sorted(epoch) != epoch.tolist()
    other = by_index(pipeline().shuffle(22, seed=4).batch(8).repeat(3))
    assert other.batch(0)[1].tolist() != made.batch(0)[1].tolist()
    assert other.epochs == 3


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: pipeline().batch(8).shuffle(3, seed=1), "Batch Shuffle"),
        (lambda: pipeline().repeat(2).batch(8), "Repeat Batch"),
        (lambda: pipeline().map(lambda x, y: (x, y)).batch(8), "Map"),
        (lambda: pipeline().shuffle(9, seed=1), "TensorSlice Shuffle"),
        (lambda: pipeline().shuffle(9, seed=1).cache().batch(8), "Cache Batch"),
        (lambda: pipeline().shuffle(9).batch(8), "without a seed"),
        (
            lambda: pipeline().shuffle(9, seed=1, reshuffle_each_iteration=False).batch(8),
            "reshuffle_each_iteration",
        ),
        (lambda: pipeline({"a": {"b": X}}).batch(8), "nested"),
        (lambda: tf.data.Dataset.range(9).batch(3), "Range"),
    ],
)
def test_any_other_pipeline_is_refused_with_the_form_to_use(make: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        by_index(make())


def step_fn(state: Any, batch: Any) -> Any:
    x, _, weight = batch
    return {"w": state["w"] * np.float32(0.9) + (x * weight[:, None]).sum(0)}, None


class Stop(Hook):
    def after_step(self, trainer: Any, logs: Any) -> None:
        if trainer.step == 4:
            trainer.request_stop("interrupted")


def test_a_trainer_and_a_strategy_take_it_and_end_with_it(tmp_path: Path) -> None:
    def trained(where: Path, *parts: Any) -> Any:
        for hooks in parts:
            data = pipeline().shuffle(22, seed=3).batch(8).repeat(2)
            state = {"w": np.zeros(3, np.float32)}
            Trainer(step_fn, state, data, RunConfig(where), hooks).train()
        return load_checkpoint(where)["w"]

    whole = trained(tmp_path / "whole", ())
    assert trained(tmp_path / "cut", (Stop(),), ()).tobytes() == whole.tobytes()
    assert trained(tmp_path / "cut", (Stop(),)).tobytes() == whole.tobytes()  # ended already
    strategy = OneDeviceStrategy(replicas=2)
    data = pipeline().shuffle(22, seed=3).batch(8).repeat(2)
    batches = strategy.experimental_distribute_dataset(data)
    assert len([*batches]) == 3
    assert strategy.recipe(data)["data_seed"] == 3
