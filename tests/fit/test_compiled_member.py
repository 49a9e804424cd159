"""A compiled model as a member of a `Checkpoint` brings its optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

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


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("model", lambda model: {"model": model}),
        ("parts/0", lambda model: {"parts": [model]}),
        ("parts/model", lambda model: Checkpoint(parts={"model": model})),
        ("(the state itself)", lambda model: model),
    ],
)
def test_a_model_that_leaves_its_optimizer_behind_is_named_once(
    tmp_path: Path, path: str, make: Any
) -> None:
    model = compiled()
    state = make(model)
    with Manager(tmp_path / "run") as manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.restore_or_initialize(state)
        manager.save(0, state)  # not trained: nothing is lost
        assert [each for each in caught if "optimizer" in str(each.message)] == []
        for step in range(1, 4):
            model.train_on_batch(X, Y)
            manager.save(step, state)
    (text,) = [str(each.message) for each in caught if "optimizer" in str(each.message)]
    assert text.startswith(f"{path}: ")
    assert "perdure.Checkpoint(model=model)" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda model: {"model": model, "optimizer": model.optimizer},
        lambda model: {"model": model, "inner": {"moments": [*model.optimizer.variables]}},
        lambda model: Checkpoint(model=model),
    ],
)
def test_a_model_whose_optimizer_is_in_the_state_is_not_named(tmp_path: Path, make: Any) -> None:
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    with Manager(tmp_path / "run") as manager, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(3):
            manager.save(step, make(model))
            model.train_on_batch(X, Y)


def test_weights_that_are_saved_alone_on_purpose_are_not_named(tmp_path: Path) -> None:
    model = compiled()
    only = perdure.keras.ModelCheckpoint(tmp_path / "run", save_weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[only])
    assert len(perdure.CheckpointManager(tmp_path / "run").all_steps()) == 3
