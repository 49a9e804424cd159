"""The Keras callbacks: refusals, messages, and checkpoints of a model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cases import BATCH, Fault, arrays, network, same, train

import perdure
from damage import flip
from perdure.errors import (
    ArgumentError,
    MismatchError,
    RecipeMismatchError,
    StepNotFoundError,
    TrainError,
)
from perdure.keras import BackupAndRestore, ModelCheckpoint, fit_saving, load_weights
from perdure.store import Run


@pytest.mark.parametrize("save_freq", [0, -1, 1.5, True, None, "batch", False])
def test_save_freq_is_checked(save_freq: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_freq"):
        BackupAndRestore(tmp_path, save_freq)


@pytest.mark.parametrize("directory", ["", None])
def test_an_empty_directory_name_is_refused(directory: Any) -> None:
    with pytest.raises(ArgumentError, match="Empty `backup_dir` argument passed"):
        BackupAndRestore(directory)
    with pytest.raises(ArgumentError, match="filepath: expected a directory"):
        ModelCheckpoint(directory)


def test_backup_and_restore_has_the_signature_of_keras(tmp_path: Path) -> None:
    callback = BackupAndRestore(tmp_path, "epoch", False, True)
    theirs = keras.callbacks.BackupAndRestore(str(tmp_path), "epoch", False, True)
    for name in ("backup_dir", "save_freq", "double_checkpoint", "delete_checkpoint"):
        assert getattr(callback, name) == getattr(theirs, name)


class Unbuilt(keras.Model):
    def call(self, x: Any) -> Any:
        return x


class Distilled(keras.Model):
    """Has a layer that only `train_step` calls."""

    def __init__(self, with_teacher: bool) -> None:
        super().__init__()
        self.body, self.with_teacher = keras.layers.Dense(3), with_teacher
        self.teacher = keras.layers.Dense(3, trainable=False, name="teacher")

    def build(self, shape: Any) -> None:
        self.body.build(shape)

    def call(self, x: Any) -> Any:
        return self.body(x)

    def train_step(self, data: Any) -> Any:
        if self.with_teacher:
            self.teacher(data[0])
        return super().train_step(data)


@pytest.mark.parametrize("build", [False, True])
def test_a_layer_that_the_first_step_builds_is_refused_by_the_first_save(
    tmp_path: Path, build: bool
) -> None:
    def made(with_teacher: bool = True) -> Any:
        model: Any = Distilled(with_teacher)
        if build:
            model.teacher.build((None, 5))
        model.compile("adam", "mse")
        return model

    def unused() -> Any:
        return made(with_teacher=False)

    x, _ = arrays()
    options: dict[str, Any] = {"x": x, "y": x[:, :3], "batch_size": BATCH}
    models = [unused, made] if build else [unused]  # the controls
    for number, model in enumerate(models):
        whole = train(None, model=model, **options)
        with pytest.raises(Fault):
            train(tmp_path / str(number), (1, 2), model=model, **options)
        assert same(train(tmp_path / str(number), model=model, **options), whole)
    if not build:
        with pytest.raises(TrainError, match=r"'teacher' not built.*`layer\.build"):
            train(tmp_path / "late", model=made, **options)


def test_no_model_and_a_custom_loop_are_refused(tmp_path: Path) -> None:
    callback = BackupAndRestore(tmp_path)
    with pytest.raises(TrainError) as error:
        callback.on_train_begin()
    assert "callback of `fit`" in str(error.value)
    callback.set_model(network())
    with pytest.raises(TrainError) as error:
        callback.on_train_begin()
    assert "CheckpointManager" in str(error.value)


def begun(where: Path, **fit: Any) -> None:
    with pytest.raises(Fault):
        train(where, (1, 1), **fit)
    fit_saving._open[str(where)].wait_until_finished()  # the last save may still be running


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "units": ({"model": lambda: network(8)}, ["model.config.layers.1.config.units", "6", "8"]),
    "rate": ({"model": lambda: network(rate=0.1)}, ["compile.optimizer.config.learning_rate"]),
    "batches": ({"batch_size": 8}, ["fit.batch_size", "6", "8"]),
    "order": ({"shuffle": False}, ["fit.shuffle"]),
    "shrunk": (
        dict(zip("xy", arrays(15), strict=True)) | {"batch_size": 6},
        ["data.batches", "22", "15"],
    ),
    "content": ({"x": arrays()[0] + 1, "y": arrays()[1], "batch_size": 6}, ["data.content"]),
    "validated": ({"validation_data": arrays(6)}, ["validation_data"]),
}


@pytest.fixture(scope="module")
def begun_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interrupted run, which a refused `fit` must not change."""
    run = tmp_path_factory.mktemp("begun") / "run"
    begun(run)
    return run


@pytest.mark.parametrize("change", CHANGES)
def test_changed_settings_are_refused_and_listed(change: str, begun_run: Path) -> None:
    fit, words = CHANGES[change]
    before = Run(begun_run).steps()
    with pytest.raises(RecipeMismatchError) as error:
        train(begun_run, **fit)
    assert Run(begun_run).steps() == before
    for word in words:
        assert word in str(error.value)


def test_a_changed_setting_may_be_allowed(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"fit\.shuffle"):
        end = train(tmp_path / "run", shuffle=False, options={"allow": ("fit.shuffle",)})
    assert end.epochs == [0, 1, 2]


@pytest.mark.parametrize("epochs", [2, 5])
def test_a_resumed_fit_may_have_another_number_of_epochs(epochs: int, tmp_path: Path) -> None:
    whole = train(None, epochs=epochs)
    begun(tmp_path / "run")
    assert same(train(tmp_path / "run", epochs=epochs), whole)


def test_a_finished_fit_is_continued_with_more_epochs(tmp_path: Path) -> None:
    kept = {"delete_checkpoint": False}
    train(tmp_path / "run", options=kept)
    end = train(tmp_path / "run", options=kept, epochs=5)
    assert same(end, train(None, epochs=5))
    assert {epoch for epoch, _ in end.steps} == {3, 4}


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    perdure.Checkpoint(w=np.zeros(3)).save(tmp_path / "run", 3)
    with pytest.raises(TrainError) as error:
        train(tmp_path / "run")
    assert "something else" in str(error.value)


def generated() -> Any:
    x, y = arrays()
    while True:
        yield x[:6], y[:6]


def test_a_generator_warns_at_the_start(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="generator"):
        train(tmp_path / "run", x=generated, steps_per_epoch=2, shuffle=False)


def test_a_dataset_that_changes_warns_at_the_start(tmp_path: Path) -> None:
    class Changing(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            x, y = arrays()
            return x[:6], y[:6]

        def on_epoch_end(self) -> None:
            pass

    with pytest.warns(UserWarning, match="on_epoch_end"):
        train(tmp_path / "run", x=Changing, shuffle=False)

    class Drawing(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.noise: Any = np.random.default_rng(0)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            x, y = arrays()
            return x[:6] + self.noise.random(), y[:6]

    with pytest.warns(UserWarning, match="Drawing that holds a random generator"):
        train(tmp_path / "drawing", x=Drawing, shuffle=False)

    class Augmenting(Drawing):
        def __init__(self) -> None:
            super().__init__()
            self.noise = keras.layers.GaussianNoise(0.1, seed=1)

        def __getitem__(self, index: int) -> Any:
            x, y = arrays()
            return np.asarray(self.noise(x[:6], training=True)), y[:6]

    with pytest.warns(UserWarning, match="Augmenting that holds a random generator"):
        train(tmp_path / "augmenting", x=Augmenting, shuffle=False)


def test_a_state_that_a_backup_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Set(keras.callbacks.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(TrainError, match=r"Set.state_dict\(\): expected .* of type object"):
        train(tmp_path / "run", callbacks=[Set()])


def test_an_interrupted_fit_does_not_lock_the_next(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    begun(tmp_path / "run")
    assert train(tmp_path / "run").epochs == [0, 1, 2]


def weights(model: Any) -> list[bytes]:
    return [np.asarray(weights).tobytes() for weights in model.get_weights()]


def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    class Bad(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["score"] = [0.5, 0.9, float("nan"), 0.7, 0.6][epoch]

    seen: list[list[bytes]] = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(weights(self.model))

    def others() -> list[Any]:
        directory = tmp_path / "best"
        kept = ModelCheckpoint(directory, "score", mode="max", max_to_keep=1)
        only = ModelCheckpoint(tmp_path / "only", "score", mode="max", save_best_only=True)
        light = ModelCheckpoint(tmp_path / "light", "loss", save_weights_only=True, save_freq=3)
        return [Bad(), kept, only, light, Seen()]

    train(None, callbacks=others, epochs=5)
    assert Run(tmp_path / "best").steps() == [8, 20]
    assert Run(tmp_path / "only").steps() == [4, 8]
    assert Run(tmp_path / "light").steps()[-1] == 18
    assert not [p for p in perdure.load_checkpoint(tmp_path / "light") if p == "optimizer"]
    model = network()
    assert load_weights(model, tmp_path / "best", "best") == 8
    assert weights(model) == seen[1]
    assert load_weights(model, tmp_path / "best") == 20
    assert weights(model) == seen[4]
    assert load_weights(model, tmp_path / "only", 4) == 4
    assert weights(model) == seen[0]
    before = weights(other := network(8))
    with pytest.raises(MismatchError):
        load_weights(other, tmp_path / "best")
    assert weights(other) == before
    with pytest.raises(StepNotFoundError):
        load_weights(model, tmp_path / "best", 5)
    with pytest.raises(ArgumentError):
        load_weights(model, tmp_path / "best", "newest")  # type: ignore[arg-type]


def test_load_weights_warns_about_a_damaged_checkpoint(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", "loss")
    train(None, callbacks=[kept])
    older, newest = Run(tmp_path / "kept").steps()[-2:]
    pack = max((tmp_path / "kept" / "packs").iterdir())
    assert pack.name.startswith(f"{newest:012d}")
    flip(pack, 10)
    with pytest.warns(UserWarning, match=f"step {newest} is damaged"):
        assert load_weights(network(), tmp_path / "kept") == older


def test_the_best_value_is_part_of_a_backup(tmp_path: Path) -> None:
    def others(where: str) -> Any:
        return lambda: [ModelCheckpoint(tmp_path / where, "loss", save_best_only=True)]

    train(None, callbacks=others("whole"), epochs=4)
    begun(tmp_path / "run", callbacks=others("parts"), epochs=4)
    train(tmp_path / "run", callbacks=others("parts"), epochs=4)
    one, other = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    assert one.steps() == other.steps()
    for step in one.steps():
        assert one.manifest(step).fingerprint == other.manifest(step).fingerprint


def test_a_resumed_fit_warns_and_does_not_save_pruned_checkpoints_again(tmp_path: Path) -> None:
    def others(where: str) -> Any:
        return lambda: [ModelCheckpoint(tmp_path / where, "gone", save_freq=1, max_to_keep=1)]

    train(None, callbacks=others("whole"))
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 2), callbacks=others("parts"), save_freq="epoch")
    with pytest.warns(
        UserWarning, match=r"step [56] is not saved: an earlier fit reached step [67]"
    ):
        train(tmp_path / "run", callbacks=others("parts"), save_freq="epoch")
    one, other = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    assert one.steps() == other.steps() == [12]
    assert one.manifest(12).fingerprint == other.manifest(12).fingerprint


@pytest.mark.parametrize("options", [{"save_freq": 0}, {"save_freq": 2.0}])
def test_model_checkpoint_checks_its_arguments(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unrecognized save_freq"):
        ModelCheckpoint(tmp_path, **options)


@pytest.mark.parametrize("name", ["{epoch:02d}", "model.keras", "w.weights.h5", "a/{epoch}.keras"])
def test_model_checkpoint_refuses_file_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="filepath: expected a directory, found"):
        ModelCheckpoint(tmp_path / name)


def test_model_checkpoint_has_the_signature_of_keras() -> None:
    theirs = [*inspect.signature(keras.callbacks.ModelCheckpoint).parameters.values()]
    ours = [*inspect.signature(ModelCheckpoint).parameters.values()][: len(theirs)]
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


def test_a_monitor_without_a_direction_is_refused(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "run", "unheard_of", save_best_only=True)
    with pytest.raises(ValueError, match="unheard_of"):
        train(None, callbacks=[callback])


def test_a_missing_monitor_is_a_warning_and_the_checkpoint_is_saved(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "run", "val_loss", save_best_only=True, max_to_keep=None)
    with pytest.warns(UserWarning, match="val_loss available"):
        train(None, callbacks=[callback])
    assert Run(tmp_path / "run").steps() == [4, 8, 12]


def test_verbose_prints_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ModelCheckpoint(
        tmp_path / "run", "loss", 1, save_best_only=True, initial_value_threshold=-1.0
    )
    train(None, callbacks=[callback])
    assert "loss did not improve from -1.00000" in capsys.readouterr().out
    assert not (tmp_path / "run" / "checkpoints").exists()
    train(None, callbacks=[ModelCheckpoint(tmp_path / "all", "loss", 1)])
    assert "Epoch 1: saving step 4 to " in capsys.readouterr().out
