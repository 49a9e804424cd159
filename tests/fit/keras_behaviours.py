"""The behaviour that Keras's tests require of its two checkpoint callbacks, tested on perdure's.

A part of `backend_worker.py`. A run directory has no file names, so those are left out, and one number
differs: after an interruption in the middle of an epoch Keras repeats its first batches, so that its
test counts 17 steps instead of 15. perdure's callback must count 15.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np

from perdure import CheckpointManager
from perdure.keras import BackupAndRestore, ModelCheckpoint, fit_saving, load_weights
from perdure.store import Run

BEHAVIOURS: dict[str, Callable[[Path], None]] = {}


def behaviour(function: Callable[[Path], None]) -> Callable[[Path], None]:
    BEHAVIOURS[function.__name__] = function
    return function


class Interrupted(RuntimeError):
    pass


class Interrupt(keras.callbacks.Callback):
    """Raises after the given number of batches or epochs of this process."""

    def __init__(self, batches: int = 0, epochs: int = 0) -> None:
        super().__init__()
        self.left = {"batch": batches, "epoch": epochs}

    def _count(self, kind: str) -> None:
        self.left[kind] -= 1
        if self.left[kind] == 0:
            raise Interrupted(kind)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("batch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._count("epoch")


class Counting(keras.layers.Layer):
    """Counts its calls in a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        return x


def counting_model() -> Any:
    model = keras.Sequential([keras.layers.Input((3,)), Counting(), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd", metrics=["mse"])
    return model


def calls(model: Any) -> int:
    count: Any = keras.ops.convert_to_numpy(model.layers[0].calls.value)
    return int(count)


def interrupted_fit(
    directory: Path,
    interrupt: Interrupt,
    between: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[Any, Any, Path]:
    """A fit of 3 batches per epoch that is interrupted and then called again for 5 epochs.

    Model and callback are the same objects in both calls, and the first asks for other epochs.
    """
    backup_dir = directory / "sub" / "backup"
    model, backup = counting_model(), BackupAndRestore(backup_dir, **options)
    random = np.random.default_rng(0)
    x, y = random.random((10, 3)), random.random((10, 1))
    try:
        model.fit(x, y, batch_size=4, epochs=6, verbose=0, callbacks=[backup, interrupt])
    except Interrupted:
        assert backup_dir.exists()
        for manager in fit_saving._open.values():  # the last save may still be running
            manager.wait_until_finished()
        between()
        return (
            model.fit(x, y, batch_size=4, epochs=5, verbose=0, callbacks=[backup]),
            model,
            backup_dir,
        )
    raise AssertionError("the interruption did not happen")


@behaviour
def an_interrupted_fit_continues_step_by_step(directory: Path) -> None:
    history, model, backup_dir = interrupted_fit(directory, Interrupt(batches=2), save_freq=1)
    assert history.epoch[-1] == 4
    assert calls(model) == 15, calls(model)
    assert not backup_dir.exists()


@behaviour
def an_interrupted_fit_continues_epoch_by_epoch(directory: Path) -> None:
    history, model, backup_dir = interrupted_fit(directory, Interrupt(epochs=3))
    assert history.epoch[-1] == 4
    assert calls(model) == 15, calls(model)
    assert not backup_dir.exists()


@behaviour
def a_damaged_backup_is_replaced_by_the_one_before(directory: Path) -> None:
    def damage() -> None:
        pack = max((directory / "sub" / "backup" / "packs").iterdir())
        pack.write_bytes(b"0")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history, model, _ = interrupted_fit(
            directory, Interrupt(epochs=3), damage, double_checkpoint=True
        )
    assert any("is damaged" in str(warning.message) for warning in caught)
    assert history.epoch[-1] == 4
    assert calls(model) == 15, calls(model)


@behaviour
def a_finished_fit_leaves_no_backup(directory: Path) -> None:
    x, y = np.ones((10, 3)), np.ones((10, 1))
    backup = BackupAndRestore(directory / "backup", save_freq="epoch")
    counting_model().fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[backup])
    assert not (directory / "backup").exists()


def error_of(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text of the `ValueError` that a call raises."""
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("a ValueError was expected")


@behaviour
def bad_arguments_are_value_errors(directory: Path) -> None:
    for save_freq in ("batch", 0.15):
        assert "Invalid value" in error_of(BackupAndRestore, "backup", save_freq)
    for backup_dir in ("", None):
        assert "Empty `backup_dir` argument passed" in error_of(BackupAndRestore, backup_dir)
    assert "Unrecognized save_freq" in error_of(ModelCheckpoint, directory, save_freq="invalid")
    ModelCheckpoint(directory, save_freq="epoch")
    ModelCheckpoint(directory, save_freq=3)


# ---------------------------------------------------------------- ModelCheckpoint


def new_classifier() -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(5, "relu"), layers.Dense(3, "softmax")]
    )
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.Accuracy("acc")])
    return model


@cache
def classifier_and_start() -> tuple[Any, list[Any]]:
    model = new_classifier()
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    return model, [np.asarray(keras.ops.convert_to_numpy(v.value)).copy() for v in variables]


def classifier() -> Any:
    """One model, reset to its start: compiling a new one takes longer than training it."""
    model, start = classifier_and_start()
    variables = [*model.variables, *model.optimizer.variables]
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    return model


def fit_classifier(callback: Any, model: Any = None, epochs: int = 1, batch_size: int = 5) -> Any:
    random = np.random.default_rng(42)
    x, y = random.normal(size=(30, 3)).astype("float32"), np.eye(3, dtype="float32")[[0, 1, 2] * 10]
    model = model or classifier()
    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(x[::-1], y[::-1]),
        callbacks=callback if isinstance(callback, list) else [callback],
        verbose=0,
    )
    return model


def saved_steps(directory: Path) -> list[int]:
    return Run(directory).steps() if (directory / "perdure.json").exists() else []


@behaviour
def every_monitor_and_mode_saves(directory: Path) -> None:
    cases = [
        ("val_loss", "auto", False),
        ("val_loss", "min", False),
        ("val_acc", "max", False),
        ("val_acc", "max", True),
    ]
    for number, (monitor, mode, best) in enumerate(cases):
        run = directory / "sub" / str(number)
        fit_classifier(ModelCheckpoint(run, monitor, save_best_only=best, mode=mode))
        assert saved_steps(run) == [6], (monitor, mode, best, saved_steps(run))


@behaviour
def an_unknown_monitor_warns_and_saves(directory: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_classifier(ModelCheckpoint(directory, "unknown", save_best_only=True, mode="min"))
    assert any("unknown available" in str(warning.message) for warning in caught)
    assert saved_steps(directory) == [6]


@behaviour
def an_unknown_mode_warns(directory: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ModelCheckpoint(directory, mode="unknown")
    assert "ModelCheckpoint mode 'unknown' is unknown" in str(caught[-1].message)


@behaviour
def save_freq_counts_batches_over_epochs(directory: Path) -> None:
    for weights_only in (False, True):
        run = directory / str(weights_only)
        callback = ModelCheckpoint(
            run, save_freq=15, save_weights_only=weights_only, max_to_keep=None
        )
        fit_classifier(callback, epochs=10, batch_size=6)  # 5 batches: epochs 3, 6 and 9
        assert saved_steps(run) == [15, 30, 45], saved_steps(run)
    every = directory / "every"
    fit_classifier(ModelCheckpoint(every, save_freq=1, max_to_keep=None), epochs=5, batch_size=15)
    assert saved_steps(every) == [*range(1, 11)]


@behaviour
def the_initial_threshold_decides_the_first_save(directory: Path) -> None:
    cases: list[tuple[str, str, float | None, bool]] = [
        ("val_acc", "max", -0.01, True),
        ("val_loss", "auto", None, True),
        ("val_loss", "min", 0, False),
        ("val_loss", "auto", 0, False),
    ]
    for number, (monitor, mode, threshold, saves) in enumerate(cases):
        run = directory / str(number)
        fit_classifier(
            ModelCheckpoint(
                run,
                monitor,
                save_best_only=True,
                mode=mode,
                initial_value_threshold=threshold,
            )
        )
        assert bool(saved_steps(run)) is saves, (monitor, mode, threshold)
    model = new_classifier()
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.AUC()])
    run = directory / "auc"
    callback = ModelCheckpoint(run, "val_auc", save_best_only=True, initial_value_threshold=1)
    fit_classifier(callback, model)
    assert saved_steps(run) == []


@behaviour
def what_was_saved_is_loaded(directory: Path) -> None:
    for weights_only in (False, True):
        run = directory / str(weights_only)
        trained = fit_classifier(
            ModelCheckpoint(run, save_best_only=True, save_weights_only=weights_only)
        )
        fresh = new_classifier()
        assert load_weights(fresh, run) == 6
        for value, expected in zip(fresh.get_weights(), trained.get_weights(), strict=True):
            assert value.tobytes() == expected.tobytes()


@behaviour
def the_states_of_a_stateful_recurrent_layer_come_back(directory: Path) -> None:
    def recurrent(value: float) -> Any:
        cell: Any = keras.layers.GRU(3, stateful=True)
        model = keras.Sequential([keras.Input((4, 2), batch_size=2), cell])
        for state in cell.states:
            state.assign(keras.ops.full((2, 3), value))
        return model

    with CheckpointManager(directory) as manager:
        manager.save(1, {"model": recurrent(0.25)})
        fresh = recurrent(0.0)
        manager.restore(like={"model": fresh})
    (state,) = fresh.layers[0].states
    assert np.all(np.asarray(keras.ops.convert_to_numpy(state)) == 0.25)


class Lowering(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            model: Any = self.model
            model.optimizer.momentum = 0.1


@behaviour
def an_attribute_that_a_compiled_step_has_read_is_warned_about(directory: Path) -> None:
    model = new_classifier()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_classifier([Lowering(), BackupAndRestore(directory, 2)], model, epochs=3)
    told = ["optimizer.momentum changed after" in str(each.message) for each in caught]
    assert sum(told) == (keras.backend.backend() != "torch")


@behaviour
def a_dict_that_leaves_the_optimizer_behind_is_warned_about(directory: Path) -> None:
    model = new_classifier()
    model.compile("adam", "categorical_crossentropy")
    x, y = np.ones((2, *model.input_shape[1:])), np.ones((2, *model.output_shape[1:]))
    with CheckpointManager(directory) as manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            manager.save(step, {"model": model})
            model.train_on_batch(x, y)
    told = [str(each.message) for each in caught if "optimizer of this" in str(each.message)]
    assert [text.partition(":")[0] for text in told] == ["model"]


def check_behaviours(directory: Path) -> dict[str, str | None]:
    """The error of each behaviour, or None if it holds."""
    results: dict[str, str | None] = {}
    for name, check in BEHAVIOURS.items():
        keras.utils.set_random_seed(1)
        try:
            check(directory / name)
            results[name] = None
        except Exception:  # noqa: BLE001 (reported by name, and judged by the test)
            results[name] = traceback.format_exc()
    return results
