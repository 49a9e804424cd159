"""Further members of a backup, and what a backup does with other callbacks and files."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import torch
from cases import (
    BATCH,
    BATCHES,
    EPOCHS,
    Fault,
    OfAttributes,
    OfVariable,
    arrays,
    compiled,
    network,
    same,
    train,
)

from perdure import CheckpointManager
from perdure.errors import RecipeMismatchError, TrainError
from perdure.keras import BackupAndRestore, ModelCheckpoint, fit_saving
from perdure.keras.callback_state import pack, unpack
from perdure.state import bits, keras_state
from perdure.store import Run


class Drawing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        torch.rand(())
        random.random()
        np.random.random()  # noqa: NPY002 (as users do)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("fault_at", "save_freq", "fit"),
    [
        ((1, 1), "epoch", {}),
        ((1, 1), 1, {}),
        ((1, 0), "epoch", {"steps_per_epoch": 3}),
        ((2, 0), "epoch", {"steps_per_epoch": 2}),
    ],
)
def test_draws_at_the_begin_of_an_epoch_happen_once(
    fault_at: tuple[int, int], save_freq: Any, fit: dict[str, Any], tmp_path: Path
) -> None:
    whole = train(None, callbacks=lambda: [Drawing()], **fit)
    with pytest.raises(Fault):
        train(tmp_path / "run", fault_at, callbacks=lambda: [Drawing()], save_freq=save_freq, **fit)
    end = train(tmp_path / "run", callbacks=lambda: [Drawing()], save_freq=save_freq, **fit)
    assert same(end, whole)
    assert len(end.steps) < len(whole.steps)


@keras.saving.register_keras_serializable("tests")
class Second(keras.Sequential):
    """Trains with an optimizer and a metric that are plain attributes, unknown to Keras."""

    @property
    def metrics(self) -> list[Any]:
        return []

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        ops: Any = keras.ops
        loss = ops.mean((self(x, training=True) - ops.cast(y, "float32")[:, None]) ** 2)
        loss.backward()
        variables = self.trainable_variables
        grads = [variable.value.grad for variable in variables]
        with torch.no_grad():
            self.parts["second"].apply(grads, variables)
        self.seen.update_state(loss)
        return {"loss": self.seen.result()}


def second(*, build: bool = True, compiled: Any = "sgd") -> Any:
    model: Any = Second([keras.Input((5,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
    model.parts = {"second": keras.optimizers.Adam(1e-2)}
    model.seen = keras.metrics.Mean()
    if build:
        model.parts["second"].build(model.trainable_variables)
    model.compile(compiled)
    return model


def test_optimizers_and_metrics_that_are_attributes_resume(tmp_path: Path) -> None:
    whole = train(None, model=second)
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 2), model=second)
    end = train(tmp_path / "run", model=second)
    assert same(end, whole)
    assert len(end.steps) < len(whole.steps)


def test_an_optimizer_that_is_not_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError) as error:
        train(tmp_path / "run", model=lambda: second(build=False))
    assert "model.parts.second" in str(error.value)


@pytest.mark.parametrize("compiled", ["sgd", None])
def test_model_checkpoint_counts_the_steps_of_an_attribute_optimizer(
    compiled: Any, tmp_path: Path
) -> None:
    model = second(compiled=compiled)
    x, y = arrays()
    kept = ModelCheckpoint(tmp_path / "kept", "loss")
    model.fit(x, y, 6, 2, verbose=0, callbacks=[kept])
    assert Run(tmp_path / "kept").steps() == [BATCHES, 2 * BATCHES]
    leaves = Run(tmp_path / "kept").manifest(BATCHES).leaves
    assert [leaf for leaf in leaves if "second" in leaf.path]


def test_a_second_fit_has_directories_of_its_own(tmp_path: Path) -> None:
    model, (x, y) = network(), arrays()
    kept = ModelCheckpoint(tmp_path / "kept", "loss", save_freq=np.int64(2))  # type: ignore[arg-type]
    for _ in range(2):  # the steps of one optimizer go on
        model.fit(x, y, 6, 1, verbose=0, callbacks=[kept])
    before = Run(tmp_path / "kept").steps()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(TrainError, match="an earlier `fit` there") as error:
        model.fit(x, y, 6, 1, verbose=0, callbacks=[kept])
    assert "a directory of its own" in str(error.value)
    assert Run(tmp_path / "kept").steps() == before
    with pytest.raises(Fault):
        train(tmp_path / "fold", (1, 2))
    with pytest.raises(RecipeMismatchError, match="give each one a `backup_dir` of its own"):
        train(tmp_path / "fold", x=x + 1, y=y, batch_size=BATCH)


class Passing(keras.callbacks.Callback):
    """`pending` is 0 when training begins and at every save, and 1 when an epoch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.pending += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.pending -= 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["pending"] = self.pending


def test_an_attribute_with_its_first_value_is_restored(tmp_path: Path) -> None:
    whole = train(None, callbacks=lambda: [Passing()])
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 2), callbacks=lambda: [Passing()])
    assert same(train(tmp_path / "run", callbacks=lambda: [Passing()]), whole)


COUNTED: dict[str, Any] = {"batches": 0}
NOISE = np.random.default_rng(5)


class Outside(keras.callbacks.Callback):
    """Its learning rate depends on what is outside of it: its class, the module, a generator."""

    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        Outside.batches += 1
        COUNTED["batches"] += 2
        noise = sum([NOISE.random() for _ in range(2)])
        rate = 0.1 / (1 + Outside.batches + COUNTED["batches"] + noise)
        self.model.optimizer.learning_rate = rate  # type: ignore[union-attr]


def outside() -> list[keras.callbacks.Callback]:
    """As in a new process."""
    Outside.batches = COUNTED["batches"] = 0
    NOISE.bit_generator.state = np.random.default_rng(5).bit_generator.state
    epochs = 0

    def scale(epoch: int, logs: Any = None) -> None:
        nonlocal epochs
        epochs += 1
        COUNTED["batches"] += epochs

    lambdas = [keras.callbacks.LambdaCallback(on_epoch_end=each) for each in (scale, grow())]
    return [Outside(), *lambdas]


def grow() -> Any:
    """Another function of this name of a variable."""
    epochs = 10

    def scale(epoch: int, logs: Any = None) -> None:
        nonlocal epochs
        epochs *= 2
        COUNTED["batches"] += epochs

    return scale


@pytest.mark.parametrize("fault_at", [(0, 2), (1, 2)])
def test_what_the_functions_of_callbacks_use_comes_back(
    tmp_path: Path, fault_at: tuple[int, int]
) -> None:
    whole = train(None, callbacks=outside)
    with pytest.raises(Fault):
        train(tmp_path / "run", fault_at, callbacks=outside)
    assert same(train(tmp_path / "run", callbacks=outside), whole)


class Collecting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.unchanged, self.epochs = {1, 2}, [object()]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(object())


def test_a_callback_attribute_that_cannot_be_saved_warns_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"Collecting\.epochs \(list\)") as caught:
        train(tmp_path / "run", callbacks=[Collecting()])
    (only,) = [str(warning.message) for warning in caught if "Collecting" in str(warning.message)]
    assert "unchanged" not in only


class Best(NamedTuple):
    loss: float
    of: dict[int, bytes]


class Keyed(keras.callbacks.Callback):
    """Lets mappings with keys of any kind, and what they hold, decide the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.by_batch: dict[Any, Any] = {}
        self.mixed: dict[Any, Any] = {"perdure": 0}
        self.counts: Counter[int] = Counter()
        self.ordered: OrderedDict[Any, float] = OrderedDict()
        self.lists: defaultdict[int, list[float]] = defaultdict(list)
        self.best = Best(0.0, {})
        self.phase, self.octets = 1 + 0j, b""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs is not None
        loss = float(logs["loss"])
        self.by_batch[len(self.by_batch)] = {batch: loss}
        self.mixed[batch] = self.mixed[str(batch)] = self.mixed[b"x", batch] = loss
        self.mixed["perdure"] += 1
        self.counts[batch] += 1
        self.ordered[batch] = loss
        self.ordered.move_to_end(batch, last=False)
        self.lists[batch].append(loss)
        self.best = Best(self.best.loss + loss, {batch: self.octets})
        self.phase *= 1j
        self.octets += b"x"
        rate = len(self.by_batch) + sum(self.mixed.values()) + len(self.octets) + self.best.loss
        rate += sum(self.counts.values()) + next(iter(self.ordered.values())) + self.phase.real
        rate += sum(map(len, self.lists.values())) + sum(map(len, self.best.of.values()))
        model: Any = self.model
        model.optimizer.learning_rate.assign(1e-3 * rate)


@pytest.mark.filterwarnings("error:BackupAndRestore")
def test_mappings_of_callbacks_come_back_with_keys_of_any_kind(tmp_path: Path) -> None:
    held: list[Keyed] = []

    def callbacks() -> list[Any]:
        held.append(Keyed())
        return held[-1:]

    whole = train(None, callbacks=callbacks)
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 2), callbacks=callbacks)
    assert same(train(tmp_path / "run", callbacks=callbacks), whole)
    for name in ("by_batch", "mixed", "counts", "ordered", "lists", "best", "phase", "octets"):
        first, resumed = getattr(held[0], name), getattr(held[2], name)
        assert (type(resumed), repr(resumed)) == (type(first), repr(first))


class Count:
    """Counts in an object of the program."""

    def __init__(self) -> None:
        self.batches = 0


class Holding(keras.callbacks.Callback):
    """Lets what it holds decide the learning rate of the next step, in many kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.recent: deque[float] = deque(maxlen=3)
        self.count = Count()
        self.source = np.random.default_rng(5)
        self.factor = keras.Variable(1.0)
        self.seed = keras.random.SeedGenerator(3)
        self.average = network()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs is not None
        self.seen.add(self.count.batches % 5)
        self.recent.append(float(logs["loss"]))
        self.count.batches += 1
        self.factor.assign(self.factor * 0.9)
        drawn: Any = keras.random.uniform((), seed=self.seed)
        model: Any = self.model
        for mine, other in zip(self.average.weights, model.weights, strict=True):
            mine.assign(0.5 * mine + 0.5 * other)
        mean: Any = keras.ops.mean(self.average.weights[0])
        rate = self.source.random() + len(self.seen) + sum(self.recent) + self.count.batches
        held: list[Any] = [keras.ops.convert_to_numpy(x) for x in (self.factor, drawn, mean)]
        rate += sum(map(float, held))
        model.optimizer.learning_rate.assign(1e-3 * rate)


def test_what_callbacks_hold_comes_back(tmp_path: Path) -> None:
    whole = train(None, callbacks=lambda: [Holding()])
    for fault_at in ((1, 2), (1, -1)):
        with pytest.raises(Fault):
            train(tmp_path / "run", fault_at, callbacks=lambda: [Holding()])
        assert same(train(tmp_path / "run", callbacks=lambda: [Holding()]), whole)


@pytest.mark.parametrize("then", [True, False])
def test_a_callback_that_holds_variables_may_be_added_and_left_out(
    then: bool, tmp_path: Path
) -> None:
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 2), callbacks=lambda: [] if then else [Holding()])
    end = train(tmp_path / "run", callbacks=lambda: [Holding()] if then else [])
    assert end.steps[0] == (1, 2)


class Weighted(keras.Sequential):
    """Its loss depends on plain attributes, which a callback and the step change."""

    factor, steps = 1.0, 0

    def train_step(self, data: Any) -> Any:
        self.steps += 1
        return super().train_step(data)

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return super().compute_loss(*given, **named) * (self.factor + 0.01 * self.steps)


class Changing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            model: Any = self.model
            model.layers[1].rate = 0.6
            model.factor = 0.5
            model.optimizer.momentum = 0.5


def weighted() -> Any:
    dense = keras.layers.Dense
    layers = [keras.Input((5,)), dense(6), keras.layers.Dropout(0.3), dense(3)]
    model = Weighted(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def test_attributes_of_a_model_that_training_changes_come_back(tmp_path: Path) -> None:
    whole = train(None, callbacks=lambda: [Changing()], model=weighted)
    for fault_at in ((1, 2), (2, 1)):
        with pytest.raises(Fault):
            train(tmp_path / "run", fault_at, callbacks=lambda: [Changing()], model=weighted)
        end = train(tmp_path / "run", callbacks=lambda: [Changing()], model=weighted)
        assert same(end, whole)


class Unfreezing(keras.callbacks.Callback):
    """Changes what Keras keeps in private attributes, and a regularizer, after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            outer = self.model.get_layer("outer")  # pyright: ignore[reportOptionalMemberAccess]
            outer.trainable = True
            outer.layers[0].trainable = False
            outer.layers[1].kernel_regularizer.l2 = 0.5
            outer.layers[2].dtype_policy = "mixed_bfloat16"


def frozen() -> Any:
    dense, start = keras.layers.Dense, keras.Input((5,))
    shared = dense(5)  # Keras lists it before the layer that contains it
    layers = [start, shared, dense(6, kernel_regularizer=keras.regularizers.L2(0.01)), dense(3)]
    outer = keras.Sequential(layers, name="outer")
    model: Any = keras.Model(start, dense(3)(outer(shared(start))))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.optimizer.build(model.trainable_variables)
    outer.trainable = False
    return model


def test_layers_that_a_callback_unfreezes_stay_unfrozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resumed(fault_at: tuple[int, int]) -> Any:
        with pytest.raises(Fault):
            train(tmp_path / "run", fault_at, callbacks=lambda: [Unfreezing()], model=frozen)
        return train(tmp_path / "run", callbacks=lambda: [Unfreezing()], model=frozen)

    whole = train(None, callbacks=lambda: [Unfreezing()], model=frozen)
    assert not same(whole, train(None, model=frozen))
    for fault_at in ((1, 2), (2, 1)):
        assert same(resumed(fault_at), whole)
    monkeypatch.setattr(keras_state, "_PROPERTIES", ("supports_masking",))
    assert not same(resumed((1, 2)), whole), "negative control: without `trainable`"


def of_closure() -> Any:
    calls, recent = 0, list[int]()

    def loss(y_true: Any, y_pred: Any) -> Any:
        nonlocal calls
        calls += 1
        recent.append(calls)
        return (y_pred**2).mean(-1) * (sum(recent[-3:]) + calls)

    return loss


CALLS = 0


def of_program(y_true: Any, y_pred: Any) -> Any:
    global CALLS
    CALLS += 1
    return (y_pred**2).mean(-1) * (1 + 0.1 * CALLS)


def of_new_process() -> Any:
    global CALLS
    CALLS = 0
    return of_program


class OfCalls(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: Any) -> Any:
        self.calls += 1
        return 0.1 / self.calls


class Total(keras.metrics.Metric):
    """Counts in attributes, over all epochs."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.sum, self.calls = 0.0, np.float64(0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.sum += float((y_pred.detach() ** 2).mean())
        self.calls += 1

    def result(self) -> Any:
        return self.sum / max(1, self.calls)

    def reset_state(self) -> None:
        pass


class Noisy(keras.Sequential):
    """Draws from a generator of PyTorch; its loss has a further loss, whose scale is a tensor."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.noise = torch.Generator().manual_seed(3)
        self.more, self.scale = [OfAttributes()], torch.ones(())

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.scale = self.scale * 0.9
        return super().train_step((x + torch.randn(x.shape, generator=self.noise), y))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *given: Any, **named: Any) -> Any:
        more: Any = self.more[0](y, y_pred)
        loss: Any = super().compute_loss(x, y, y_pred, *given, **named)
        return loss + more * float(self.scale)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.empty((0, 3)),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_a_tensor_in_an_attribute_keeps_its_bits(tensor: Any) -> None:
    made = unpack(pack([tensor]))[0]
    assert bits.same(made, tensor)
    assert (made.shape, made.device) == (tensor.shape, tensor.device)
    assert made.requires_grad == tensor.requires_grad


@pytest.mark.filterwarnings("error:BackupAndRestore")
@pytest.mark.parametrize(
    "model",
    [
        lambda: compiled(OfVariable()),
        lambda: compiled([OfAttributes()]),
        lambda: compiled(of_closure()),
        lambda: compiled(of_new_process()),
        lambda: compiled(rate=OfCalls()),
        lambda: compiled(metrics=[Total()]),
        lambda: compiled(kind=Noisy),
    ],
    ids=["variable", "attributes", "closure", "global", "schedule", "metric", "model"],
)
def test_what_the_parts_of_a_model_change_comes_back(model: Any, tmp_path: Path) -> None:
    whole = train(None, model=model)
    for fault_at in ((1, 2), (1, -1)):
        with pytest.raises(Fault):
            train(tmp_path / "run", fault_at, model=model)
        assert same(train(tmp_path / "run", model=model), whole)


def test_a_model_checkpoint_is_durable_before_the_next_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, order = str(tmp_path / "kept"), []
    may_go, backed_up = threading.Event(), threading.Event()
    commit, wait = Run.save, CheckpointManager.wait_until_finished

    def committed(run: Run, step: int, *rest: Any, **named: Any) -> Any:
        if run.where == kept:
            assert may_go.wait(60)
            may_go.clear()
            assert step == BATCHES or backed_up.wait(60)  # the two write in threads of their own
        order.append((step, run.where == kept))
        saved = commit(run, step, *rest, **named)
        if run.where != kept:
            backed_up.set()
            may_go.set()  # so that nothing hangs if no call waited
        return saved

    def waited(manager: CheckpointManager) -> None:
        if manager.directory == kept:
            may_go.set()
        wait(manager)

    monkeypatch.setattr(Run, "save", committed)
    monkeypatch.setattr(CheckpointManager, "wait_until_finished", waited)
    others = [ModelCheckpoint(kept, "loss")]
    train(tmp_path / "run", callbacks=others, save_freq="epoch", epochs=2)
    assert order == [(BATCHES, True), (BATCHES, False), (2 * BATCHES, True), (2 * BATCHES, False)]
    assert kept not in fit_saving._open


def test_the_environment_is_in_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(RecipeMismatchError) as error:
            train(tmp_path / "run")
        assert "environment.threads" in str(error.value)
        with pytest.warns(UserWarning, match=r"environment\.threads"):
            train(tmp_path / "run", options={"allow": ("environment.threads",)})
    finally:
        torch.set_num_threads(threads)


def test_only_files_of_the_backup_are_deleted(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    train(link)
    assert link.is_symlink()
    assert os.listdir(real) == []

    class Writing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            (tmp_path / "run" / "notes.txt").write_text("mine")

    train(tmp_path / "run", callbacks=[Writing()])
    assert os.listdir(tmp_path / "run") == ["notes.txt"]


def test_a_backup_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, *_: Any, **named: Any) -> None:
        raise PermissionError(13, "refused", path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="could not be deleted"):
        end = train(tmp_path / "run")
    assert end.epochs == [*range(EPOCHS)]


def test_a_resume_reads_as_the_only_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Fault):
        train(tmp_path / "run", (1, 1))
    restore, held = CheckpointManager.restore, []

    def restored(manager: CheckpointManager) -> Any:
        held.append(manager._run.is_writer)
        return restore(manager)

    monkeypatch.setattr(CheckpointManager, "restore", restored)
    with pytest.raises(RecipeMismatchError):
        train(tmp_path / "run", shuffle=False)
    assert held == [True]
    with Run(tmp_path / "run") as run:  # the refused fit has released the lock
        run.begin_writing()


def test_steps_skipped_by_the_loss_scale_are_not_counted(tmp_path: Path) -> None:
    def scaled() -> Any:
        model = network()
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
        model.compile(scaled, model.loss)
        return model

    x, y = arrays()
    x[:] = np.float32(3e38)  # gradients of these inputs are not finite
    kept = ModelCheckpoint(tmp_path / "kept", "accuracy", mode="max")
    train(None, model=scaled, x=x, y=y, batch_size=6, callbacks=[kept])
    assert Run(tmp_path / "kept").steps() == [0]


def test_the_backend_of_these_tests_stays_in_their_process(request: pytest.FixtureRequest) -> None:
    plugin: Any = request.config.pluginmanager.get_plugin(
        str(Path(__file__).parent / "conftest.py")
    )
    assert keras.backend.backend() == "torch"
    assert os.environ.get("KERAS_BACKEND") == plugin._before


@keras.saving.register_keras_serializable("tests")
class Telling(keras.Sequential):
    """Returns an array in the logs of a step."""

    tells: Any = None

    def train_step(self, data: Any) -> Any:
        bias = self.layers[-1].bias.value.detach().clone()
        return {**super().train_step(data), "bias": bias, **(self.tells or {})}


def telling(backup: Path, fault: Any = None, **tells: Any) -> list[Any]:
    keras.utils.set_random_seed(11)
    model: Any = Telling([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.tells = tells
    x, y = arrays()
    callbacks = [BackupAndRestore(backup, 1), *([fault] if fault else [])]
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    return [np.asarray(bias).tobytes() for bias in history.history["bias"]]


class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise Fault


def test_arrays_in_the_logs_of_a_step_are_backed_up(tmp_path: Path) -> None:
    whole = telling(tmp_path / "whole")
    with pytest.raises(Fault):
        telling(tmp_path / "run", Failing())
    assert telling(tmp_path / "run") == whole
    assert len(set(whole)) == 2


def test_logs_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"'told' in the logs of a step: expected a number"):
        telling(tmp_path / "run", told=object())


def test_a_model_that_is_made_again_is_the_same(tmp_path: Path) -> None:
    """Keras numbers all names of a process, and a layer may have that of a setting (`activation`)."""

    def fit(units: int, epochs: int) -> keras.callbacks.History:
        model: Any = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(units, activation="relu"),
                keras.layers.Activation("relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        backup = BackupAndRestore(tmp_path / "run", delete_checkpoint=False)
        x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
        return model.fit(x, y, epochs=epochs, verbose=0, callbacks=[backup])

    fit(2, 1)
    assert fit(2, 2).epoch == [0, 1]
    # The control: another model is refused.
    with pytest.raises(RecipeMismatchError, match="units"):
        fit(5, 3)
