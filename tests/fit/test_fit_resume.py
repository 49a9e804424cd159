"""`BackupAndRestore`: an interrupted `fit` ends with the bits of an uninterrupted one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from cases import BATCH, BATCHES, EPOCHS, ROWS, End, Fault, arrays, network, same, train

from perdure.errors import ArgumentError, TrainError
from perdure.keras import BackupAndRestore, ModelCheckpoint, fit_saving
from perdure.runtime import heartbeats
from perdure.store import Run

ALL = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(BATCHES)]


def newest(backup: Path) -> int:
    """The newest step, after the background save has ended."""
    if manager := fit_saving._open.get(str(backup)):  # a refused `fit` has closed it
        manager.wait_until_finished()
    return (Run(backup).steps() or [0])[-1]


def interrupted(
    backup: Path, fault_at: tuple[int, int], again: Any = None, **options: Any
) -> tuple[End, int]:
    """The result of a run that was interrupted at `fault_at`, and the step that it resumed from."""
    with pytest.raises(Fault):
        train(backup, fault_at, **options)
    went_on = newest(backup)
    return train(backup, **{**options, **(again or {})}), went_on


@pytest.fixture(scope="module")
def whole() -> End:
    """A run without a callback of perdure; runs with one must end with the same bits."""
    return train(None)


_uninterrupted: dict[Any, End] = {}


def uninterrupted(name: Any, run: Callable[[], End]) -> End:
    """The result of a run that several tests compare with; it runs once per process."""
    if name not in _uninterrupted:
        _uninterrupted[name] = run()
    return _uninterrupted[name]


def test_the_callback_changes_nothing(whole: End, tmp_path: Path) -> None:
    assert same(train(tmp_path / "run"), whole)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault_at", ALL[::2])
def test_a_fit_interrupted_at_any_batch_ends_with_the_same_bits(
    fault_at: tuple[int, int], whole: End, tmp_path: Path
) -> None:
    end, went_on = interrupted(tmp_path / "run", fault_at)
    assert same(end, whole)
    assert went_on == ALL.index(fault_at)
    assert end.steps == ALL[went_on:]


@pytest.mark.parametrize("save_freq", ["epoch", 3, 100])
def test_save_freq_decides_where_a_fit_resumes(save_freq: Any, whole: End, tmp_path: Path) -> None:
    end, went_on = interrupted(tmp_path / "run", (2, 2), save_freq=save_freq)
    assert same(end, whole)
    assert went_on == {"epoch": 8, 3: 9, 100: 0}[save_freq]


@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_an_epoch_whose_end_raises_is_trained_again(
    save_freq: Any, whole: End, tmp_path: Path
) -> None:
    """Its backup comes after the other callbacks, which are called again."""
    ended: list[int] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: ended.append(epoch))
    end, went_on = interrupted(tmp_path / "run", (1, -1), save_freq=save_freq, callbacks=[note])
    assert same(end, whole)
    assert went_on == {"epoch": 4, 3: 6}[save_freq]
    assert end.steps == ALL[went_on:]
    assert ended == [0, 1, 1, 2]


def test_fewer_epochs_than_the_backup_has_are_refused(whole: End, tmp_path: Path) -> None:
    """A run of so few epochs would have ended before the backup. It is refused; the backup stays."""
    run = tmp_path / "run"
    with pytest.raises(Fault):
        train(run, (1, 2))
    with pytest.raises(TrainError, match=r"in epoch 2, and fit was called with epochs=1"):
        train(run, epochs=1)
    assert Run(run).steps()[-1] >= 5
    assert same(train(run), whole)
    kept: dict[str, Any] = {"options": {"delete_checkpoint": False}}
    train(run, epochs=2, **kept)
    with pytest.raises(TrainError, match=r"at the end of epoch 2"):
        train(run, epochs=1, **kept)
    assert train(run, epochs=2, **kept).steps == []
    assert same(train(run), whole)


def test_two_callbacks_in_one_directory_are_refused(tmp_path: Path) -> None:
    for other in (ModelCheckpoint(tmp_path / "run"), BackupAndRestore(tmp_path / "run")):
        with pytest.raises(ArgumentError, match="directory of its own"):
            train(tmp_path / "run", callbacks=[other])


@pytest.mark.parametrize("preemptible", [False, True])
def test_every_batch_is_a_heartbeat(
    preemptible: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `perdure run` a long epoch counts as alive, whatever `save_freq` is."""
    beats: list[tuple[str, int | None]] = []
    monkeypatch.setattr(heartbeats, "listeners", [lambda *beat: beats.append(beat)])
    model = network()
    model.fit(
        *arrays(),
        batch_size=BATCH,
        epochs=1,
        verbose=0,
        validation_data=arrays(),
        callbacks=[BackupAndRestore(tmp_path, save_before_preemption=preemptible)],
    )
    kinds = [beat for beat, _ in groupby(beats)]
    steps = [("step", step) for step in range(1, BATCHES + 1)]
    first = kinds.index(("compile", 0))
    assert kinds[first + 1 : first + 1 + BATCHES] == steps
    validating = kinds.index(("evaluate", BATCHES))
    assert ("step", BATCHES) in kinds[validating:]


class Indexed(keras.utils.PyDataset):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._x, self._y = arrays()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.asked.append(index)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        noise = np.random.random() if self.workers == 1 else 0.0  # noqa: NPY002 (as users do)
        return self._x[rows] + np.float32(noise), self._y[rows]


class Reordered(Indexed):
    """Another order in each epoch, from a generator of its own; both are its state."""

    def __init__(self) -> None:
        super().__init__()
        self._random, self._rows = np.random.default_rng(3), np.arange(ROWS)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self._rows[index * BATCH : (index + 1) * BATCH]
        return self._x[rows], self._y[rows]

    def _shuffle(self) -> None:
        self._rows = self._random.permutation(self._rows)

    on_epoch_begin = on_epoch_end = _shuffle

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "random": self._random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self._random.bit_generator.state = state["rows"], state["random"]


def loader(**options: Any) -> Any:
    x, y = arrays()
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(data, batch_size=BATCH, **options)


class Stream(torch.utils.data.IterableDataset):
    """A generator of batches without a length."""

    def __iter__(self) -> Any:
        x, y = arrays()
        for first in range(0, ROWS, BATCH):
            yield (
                torch.from_numpy(x[first : first + BATCH]),
                torch.from_numpy(y[first : first + BATCH]),
            )


SOURCES: dict[str, dict[str, Any]] = {
    "batches shuffled": {"shuffle": "batch"},
    "in order": {"shuffle": False},
    "PyDataset": {"x": Indexed},
    "PyDataset with workers": {"x": lambda: Indexed(workers=2), "shuffle": True},
    "PyDataset with a state": {"x": Reordered, "shuffle": False},
    "DataLoader": {"x": lambda: loader(shuffle=True), "shuffle": False},
    "DataLoader with a generator": {
        "x": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
        "shuffle": False,
    },
    "passes that are no epochs": {"steps_per_epoch": 2},
    "validation": {"validation_data": arrays(), "validation_batch_size": 5, "validation_freq": 2},
    "validation split": {"validation_split": 0.3},
    "a later epoch": {"initial_epoch": 1},
    "weights": {"sample_weight": np.linspace(0, 1, ROWS)},
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_data_resumes(kind: str, tmp_path: Path) -> None:
    fit = SOURCES[kind]
    # With workers, Keras starts an epoch with batches that it read ahead in the previous one.
    ours = "workers" in kind
    whole = train(tmp_path / "whole" if ours else None, **fit)
    for fault_at in [(1, 1), (1, -1)]:
        end, _ = interrupted(tmp_path / str(fault_at), fault_at, **fit)
        assert same(end, whole)
        assert len(end.steps) < len(whole.steps)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("fault_at", [(0, 1), (0, 3), (1, 3)])
def test_data_of_unknown_length_resumes(fault_at: tuple[int, int], tmp_path: Path) -> None:
    fit = {"x": lambda: torch.utils.data.DataLoader(Stream(), batch_size=None), "shuffle": False}
    whole = uninterrupted("unknown length without validation", lambda: train(None, **fit))
    end, went_on = interrupted(tmp_path / "run", fault_at, **fit)
    assert same(end, whole)
    assert end.steps == ALL[went_on:]


def test_finished_batches_are_not_read_again(tmp_path: Path) -> None:
    data = Indexed()
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 2), x=data, shuffle=False)
    went_on = newest(tmp_path / "run")
    again = Indexed()
    train(tmp_path / "run", x=again, shuffle=False)
    assert again.asked.pop(0) == 0  # Keras reads a batch to build the metrics
    assert again.asked == [*range(went_on % BATCHES, BATCHES), *range(BATCHES)]


class Counting(keras.callbacks.Callback):
    """A callback as users write them, with state in attributes and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.losses, self.best = 0, [], None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model: Any = self._model
        rate = model.optimizer.learning_rate
        rate.assign(np.asarray(keras.ops.convert_to_numpy(rate.value)) * np.float32(0.9))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.best = min(self.losses) + self.batches
        logs["seen"] = self.best


class Stated(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.secret = {("a", 1): 0}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.secret[("a", 1)] += 1
        logs["secret"] = self.secret[("a", 1)]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.secret[("a", 1)]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.secret[("a", 1)] = state["count"]


def others() -> list[Any]:
    callbacks: Any = keras.callbacks
    return [
        Counting(),
        Stated(),
        callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.4, mode="min"),
        callbacks.LearningRateScheduler(lambda _, rate: rate * 0.95),
        callbacks.EarlyStopping(
            "accuracy", patience=2, min_delta=0.2, mode="max", restore_best_weights=True
        ),
    ]


@pytest.mark.parametrize("fault_at", [(2, 1), (3, -1)])
def test_other_callbacks_resume_with_their_state(fault_at: tuple[int, int], tmp_path: Path) -> None:
    whole = uninterrupted("others", lambda: train(None, callbacks=others, epochs=9))
    assert len(whole.epochs) < 9, "early stopping must have stopped"
    fault_at = (min(fault_at[0], whole.epochs[-1]), fault_at[1])
    end, _ = interrupted(tmp_path / "run", fault_at, callbacks=others, epochs=9)
    assert same(end, whole)


def test_stopped_and_finished_runs_run_no_further_steps(tmp_path: Path) -> None:
    options = {"callbacks": others, "epochs": 9, "options": {"delete_checkpoint": False}}
    first = train(tmp_path / "run", **options)
    again = train(tmp_path / "run", **options)
    assert same(first, again)
    assert again.steps == []


def test_sigterm_saves_and_exits_with_75(whole: End, tmp_path: Path) -> None:
    def signalled() -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    options = {"save_freq": False, "options": {"save_before_preemption": True}}
    try:
        with pytest.raises(SystemExit) as left:
            train(tmp_path / "run", (1, 2), fault=signalled, **options)
    finally:
        signal.signal(
            signal.SIGTERM, before
        )  # the exit ignores SIGTERM until the process has ended
    assert left.value.code == 75
    end = train(tmp_path / "run", **options)
    assert same(end, whole)
    assert end.steps == ALL[7:]


class InValidation(keras.callbacks.Callback):
    """Sends SIGTERM after a batch of the validation of an epoch, or when it begins (-1)."""

    def __init__(self, batch: int, epoch: int = 1) -> None:
        super().__init__()
        self.at = (epoch, batch)
        self.batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_test_begin(self, logs: Any = None) -> None:
        self.on_test_batch_end(-1)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if (self.epoch, batch) == self.at:
            signal.raise_signal(signal.SIGTERM)


def in_validation(
    backup: Path | None, fault_at: tuple[int, int] | None, more: Any = list, **options: Any
) -> Any:
    """Run with SIGTERM in the validation, after (epoch, batch); None sends no signal.

    Returns the result of the run, or None if it exited.
    """
    fit = {"validation_data": arrays(), "validation_batch_size": 5, "save_freq": False, **options}
    epoch, batch = fault_at or (0, 99)
    fit["callbacks"] = lambda: [*more(), InValidation(batch, epoch)]
    fit["options"] = {"save_before_preemption": True}
    if fault_at is None:
        return train(backup, **fit)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            train(backup, **fit)
    finally:
        signal.signal(
            signal.SIGTERM, before
        )  # the exit ignores SIGTERM until the process has ended
    assert left.value.code == 75
    return None


@pytest.mark.parametrize("batch", [-1, 0, 2])
def test_sigterm_in_a_validation_saves_and_exits_within_it(batch: int, tmp_path: Path) -> None:
    fit = {"model": lambda: network(mc_dropout=True)}
    whole = uninterrupted("dropout in validation", lambda: in_validation(None, None, **fit))
    in_validation(tmp_path / "run", (1, batch), **fit)
    end = in_validation(tmp_path / "run", None, **fit)
    assert same(end, whole)
    assert end.steps == ALL[8:]


class Stopping(keras.callbacks.Callback):
    """Stops after the second batch of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches == BATCHES + 2:
            model: Any = self._model
            model.stop_training = True


class Drawing(torch.utils.data.IterableDataset):
    """A generator of noisy batches that draws once more after the last one."""

    def __iter__(self) -> Any:
        for x, y in Stream():
            yield x + torch.rand(1), y
        torch.rand(1)


class DrawingAtItsEnd(Indexed):
    """Noisy batches; random numbers are also drawn at the end of an epoch and before a validation."""

    def on_epoch_end(self) -> None:
        np.random.random()  # noqa: NPY002 (as users do)


def averaged() -> Any:
    made = network()
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.7)
    made.compile(optimizer, made.loss, metrics=["accuracy"])
    return made


# Epochs that do not end with the last batch of a pass over the data, and callbacks for such ends.
ENDS: dict[str, dict[str, Any]] = {
    "stopped": {"more": lambda: [Stopping()]},
    "stopped, draws": {"more": lambda: [Stopping()], "validation_data": DrawingAtItsEnd},
    "more steps than batches": {"steps_per_epoch": BATCHES + 2},
    "fewer steps than batches": {"steps_per_epoch": BATCHES - 1},
    "as many steps as batches": {"steps_per_epoch": BATCHES},
    "unknown length": {
        "x": lambda: torch.utils.data.DataLoader(Drawing(), batch_size=None),
        "shuffle": False,
    },
    "swapped weights": {"model": averaged, "more": lambda: [keras.callbacks.SwapEMAWeights()]},
}


def made(fit: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with new validation data for each run."""
    data = fit.get("validation_data", arrays)
    return {**fit, "validation_data": data()}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ENDS)
def test_sigterm_in_the_validation_of_any_epoch(kind: str, tmp_path: Path) -> None:
    whole = uninterrupted(kind, lambda: in_validation(None, None, **made(ENDS[kind])))
    in_validation(tmp_path / "run", (1, 1), **made(ENDS[kind]))
    end = in_validation(tmp_path / "run", None, **made(ENDS[kind]))
    assert same(end, whole)
    assert end.steps == [step for step in whole.steps if step[0] > 1]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ENDS)
def test_sigterm_in_several_validations_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = uninterrupted(kind, lambda: in_validation(None, None, **made(ENDS[kind])))
    for fault_at in [(0, 1), (0, -1), (1, 1)]:
        in_validation(tmp_path / "run", fault_at, **made(ENDS[kind]))
    end = in_validation(tmp_path / "run", None, **made(ENDS[kind]))
    assert same(end, whole)


def test_sigterm_before_a_validation_exits_before_it(tmp_path: Path) -> None:
    class Signalling(Indexed):
        def on_epoch_end(self) -> None:  # Keras calls it when it resets the data
            signal.raise_signal(signal.SIGTERM)

    data = Signalling()
    begun: list[int] = []
    telling: Any = keras.callbacks.LambdaCallback()
    telling.on_test_begin = begun.append
    in_validation(tmp_path / "run", (0, 99), lambda: [telling], validation_data=data)
    assert not begun
    assert not data.asked


# Keras starts the next pass before the validation, and PyTorch draws the order of it afterwards.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [BATCHES - 2, BATCHES - 1, BATCHES])
@pytest.mark.parametrize("term", [False, True])
def test_steps_per_epoch_with_a_validation_resumes(steps: int, term: bool, tmp_path: Path) -> None:
    fit: dict[str, Any] = {"steps_per_epoch": steps, "validation_data": arrays()}
    fit |= {"validation_batch_size": 5, "epochs": 4}
    whole = uninterrupted(f"{steps} steps", lambda: train(None, **fit))
    before = signal.getsignal(signal.SIGTERM)
    options = {"save_before_preemption": True}
    fault = (lambda: signal.raise_signal(signal.SIGTERM)) if term else None
    # Interrupted again after a resume, which must have restored everything that the first run knew.
    for fault_at in [(1, 0), (2, 0), (2, 1)]:
        try:
            with pytest.raises((Fault, SystemExit)):
                train(tmp_path / "run", fault_at, fault=fault, options=options, **fit)
        finally:
            signal.signal(signal.SIGTERM, before)
        if not term:
            newest(tmp_path / "run")
    assert same(train(tmp_path / "run", options=options, **fit), whole)


def test_sigterm_after_an_interrupted_fit_has_its_own_meaning(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with pytest.raises(Fault):
            train(tmp_path / "run", (1, 2), options={"save_before_preemption": True})
        signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_damaged_backup_is_skipped(whole: End, tmp_path: Path) -> None:
    with pytest.raises(Fault):
        train(tmp_path / "run", (2, 1), save_freq=3)
    last = newest(tmp_path / "run")
    older = Run(tmp_path / "run").steps()[-2]
    pack = max((tmp_path / "run").rglob("*.pack"), key=lambda path: path.name)
    damaged = bytearray(pack.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    pack.write_bytes(damaged)
    with pytest.warns(UserWarning, match=f"step {last} is damaged"):
        end = train(tmp_path / "run", save_freq=3)
    assert same(end, whole)
    assert end.steps == ALL[older:]


def test_control_keras_own_callback_differs(whole: End, tmp_path: Path) -> None:
    def kerases() -> list[Any]:
        theirs: Any = keras.callbacks.BackupAndRestore
        return [theirs(tmp_path / "run", save_freq=1)]

    with pytest.raises(Fault):
        train(None, (1, 2), callbacks=kerases)
    assert not same(train(None, callbacks=kerases), whole)


@pytest.mark.parametrize("part", ["randomness", "others", "seeds"])
def test_control_without_one_part_the_end_differs(
    part: str, whole: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.keras import callback_state as module
    from perdure.keras import fit_batches, fit_session

    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 1))
    if part == "randomness":
        monkeypatch.setattr(fit_batches, "restore_random", lambda *_: None)
    elif part == "others":
        monkeypatch.setattr(module.CallbackState, "restore", lambda *_: None)
    else:
        restored = vars(fit_session)["restore"]

        def forgetful(like: Any, leaves: Any) -> Any:
            made = restored(like, leaves)
            for variable in like["model"].variables:
                if variable.name == "seed_generator_state":
                    variable.assign([1, 1])
            return made

        monkeypatch.setattr(fit_session, "restore", forgetful)
    assert not same(train(tmp_path / "run"), whole)


def test_a_backup_works_in_a_callback_list_of_the_user(whole: End, tmp_path: Path) -> None:
    keras.utils.set_random_seed(11)
    model = network()
    x, y = arrays()
    listed = keras.callbacks.CallbackList(
        [BackupAndRestore(tmp_path / "run", 1)],
        add_history=True,
        model=model,
        verbose=0,
        epochs=EPOCHS,
        steps=BATCHES,
    )
    count = len(listed.callbacks)
    model.fit(x, y, BATCH, EPOCHS, 0, listed)
    assert len(listed.callbacks) == count
    assert model.history.epoch == whole.epochs
