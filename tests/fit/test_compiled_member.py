"""A compiled model as a member of a `Checkpoint` brings its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

import perdure
from perdure import Checkpoint

X, Y = np.random.default_rng(0).normal(size=(8, 3)), np.ones((8, 2))
Manager: Any = perdure.CheckpointManager  # in TensorFlow's order, which the annotations do not have


def compiled() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    return model


def weights(model: Any) -> list[bytes]:
    return [np.asarray(value).tobytes() for value in model.get_weights()]


def train(where: Path, last: int) -> list[bytes]:
    model = compiled()
    checkpoint: Any = Checkpoint(model=model, step=0)
    with Manager(checkpoint, where, max_to_keep=3) as manager:
        if status := checkpoint.restore(manager.latest_checkpoint):
            status.assert_consumed()
        while checkpoint.step < last:
            model.train_on_batch(X, Y)
            checkpoint.step += 1
            manager.save()
    return weights(model)


def test_a_loop_with_a_compiled_model_resumes_with_its_moments(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    assert train(tmp_path / "run", 5) == (whole := train(tmp_path / "whole", 5))
    model = compiled()  # the control: without the optimizer it is another training
    perdure.Checkpoint(model=model).restore(tmp_path / "run", 3).expect_partial()
    model.optimizer = keras.optimizers.Adam(0.1)
    for _ in range(2):
        model.train_on_batch(X, Y)
    assert weights(model) != whole


def test_an_optimizer_that_is_a_member_is_saved_once(tmp_path: Path) -> None:
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "run", 1)
    assert sorted(perdure.load_checkpoint(tmp_path / "run")) == ["model", "optimizer"]


def test_a_checkpoint_without_the_optimizer_restores_the_model(tmp_path: Path) -> None:
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    Checkpoint(model=plain).save(tmp_path / "run", 1)
    model = compiled()
    assert Checkpoint(model=model).restore(tmp_path / "run") == 1
    assert weights(model) == weights(plain)
    train(tmp_path / "trained", 1)
    status = Checkpoint(model=plain, step=0).restore(tmp_path / "trained")
    assert {path.partition("/")[0] for path in status.unused} == {"model.optimizer"}
    status.expect_partial()
