"""Runs the checks of the callbacks on the backend that the environment names; prints JSON.

Run as a program with a scratch directory. On TensorFlow it first forks three runs of `fit`
(whole, killed, and resumed), before anything of the framework has run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# Keras imports these for its own checks if it can, which takes longer than the tests.
if os.environ["KERAS_BACKEND"] == "tensorflow":
    sys.modules.update(sklearn=None, matplotlib=None)  # type: ignore[arg-type]
else:
    sys.modules.update(sklearn=None, matplotlib=None, tensorflow=None)  # type: ignore[arg-type]

import keras
import numpy as np
from cases import (
    BATCH,
    End,
    Fault,
    OfAttributes,
    OfVariable,
    arrays,
    compiled,
    network,
    same,
    train,
)
from keras_behaviours import check_behaviours

from perdure import CheckpointManager
from perdure.errors import TrainError, UnsupportedLeafError
from perdure.state import flatten
from perdure.store import MemoryStorage, Run


def forked(where: Path, body: Callable[[], End]) -> tuple[int, End | None]:
    """Run `body` in a new process; return its exit status and its result."""
    where.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        end = body()
        values = {name: value.hex() for name, value in end.values.items()}
        where.write_text(json.dumps([values, *end[1:]]))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        return status, None
    values, history, epochs, steps = json.loads(where.read_text())
    return status, End({n: bytes.fromhex(v) for n, v in values.items()}, history, epochs, steps)


def killed_and_resumed(work: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": lambda: network(steps_per_execution=3),
        "validation_data": (np.full((4, 5), 0.5, "float32"), np.arange(4) % 3),
    }

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _, whole = forked(work / "end", lambda: train(work / "whole", **options))
    killed, _ = forked(work / "end", lambda: train(work / "run", (1, 2), fault=kill, **options))
    _, again = forked(work / "end", lambda: train(work / "run", **options))
    assert whole is not None and again is not None  # noqa: PT018
    return {
        "killed": killed,
        "equal": same(again, whole),
        "left": len(again.steps),
        "all": len(whole.steps),
    }


def augmented(cached: bool = False, is_resumed: bool = False) -> Any:
    """A pipeline whose function changes variables, in batches that are read ahead. A resumed process
    has made the layers in another order, so that they are elsewhere in memory."""
    import tensorflow as tf

    generator = tf.random.Generator.from_seed(1)
    seeds = [*range(6)]
    made = {
        n: keras.layers.GaussianNoise(0.2, seed=n) for n in (seeds[::-1] if is_resumed else seeds)
    }
    noise = keras.Sequential([made[n] for n in seeds])
    pipeline = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(9, seed=3)
    pipeline = (pipeline.cache() if cached else pipeline).batch(BATCH)

    def changed(x: Any, y: Any) -> Any:
        return noise(x, training=True) * generator.uniform(()), y

    return pipeline.map(changed).prefetch(2)


def unbuilt(*layers: Any) -> Any:
    model = keras.Sequential([*layers, keras.layers.Dropout(0.3), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def augmented_and_resumed(work: Path) -> dict[str, Any]:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run(
        name: str, cached: bool, fault_at: tuple[int, int] | None = None, *, resumed: bool = False
    ) -> tuple[int, End | None]:
        data = partial(augmented, cached, resumed)
        options: dict[str, Any] = {"model": unbuilt, "x": data, "fault": kill}
        return forked(work / "end", lambda: train(work / name, fault_at, **options))

    report = {}
    for cached, at in ((False, (1, 2)), (True, (2, 0))):
        _, whole = run(f"augmented-{cached}", cached)
        killed, _ = run(f"killed-{cached}", cached, at)
        _, again = run(f"killed-{cached}", cached, resumed=True)
        assert whole is not None and again is not None  # noqa: PT018
        report[str(at)] = killed == -9 and same(again, whole)
    return report


def losses_resumed(work: Path) -> dict[str, Any]:
    """Whether losses that change something resume, and what a `fit` says about them."""
    report = {}
    for name, kind, eagerly in (
        ("variable", OfVariable, False),
        ("attribute", OfAttributes, True),
        ("compiled", OfAttributes, False),
    ):

        def model(kind: Any = kind, eagerly: bool = eagerly) -> Any:
            return compiled(kind(), run_eagerly=eagerly)

        x, y = arrays(4 * BATCH - 2)
        options: dict[str, Any] = {"model": model, "x": x, "y": y, "batch_size": BATCH}
        whole = train(work / f"{name}-whole", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with suppress(Fault):
                train(work / name, (1, 2), **options)
            again = train(work / name, **options)
        texts = [str(each.message) for each in caught]
        said = "".join(text for text in texts if text.startswith("BackupAndRestore"))
        report[name] = [same(again, whole), said]
    return report


class Unfreezing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            model: Any = self.model
            model.layers[0].trainable = True


def unfrozen_and_resumed(work: Path) -> bool:
    def model() -> Any:
        made = compiled(run_eagerly=True)
        made.optimizer.build(made.trainable_variables)
        made.layers[0].trainable = False
        return made

    options: dict[str, Any] = {"model": model, "callbacks": lambda: [Unfreezing()]}
    whole = train(work / "frozen", **options)  # without the callback Keras draws another order
    with suppress(Fault):
        train(work / "unfrozen", (1, 2), **options)
    return same(train(work / "unfrozen", **options), whole)


class Autoencoder(keras.Model):
    """Has no `call`, and a decoder that only `train_step` builds."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        self.decoder = keras.Sequential([keras.layers.Dense(5)], name="decoder")
        self.unused = keras.layers.Dense(5)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            decoded: Any = self.decoder(self.encoder(data))
            loss: Any = self.compute_loss(y=data, y_pred=decoded)
        weights: Any = [*self.encoder.trainable_weights, *self.decoder.trainable_weights]
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(data, data, decoded)


def built_late(work: Path) -> dict[str, Any]:
    """Whether a model whose step makes variables resumes, also if it is built (the control); what is
    said of an eager one; and what it trains without a callback of perdure."""

    def model(*, build: bool, **options: Any) -> Any:
        made: Any = Autoencoder()
        if build:
            made.decoder.build((None, 2))
        made.compile("adam", "mse", metrics=["mae"], **options)
        return made

    x, _ = arrays(4 * BATCH - 2)
    options: dict[str, Any] = {"x": x, "batch_size": BATCH, "shuffle": False}
    report: dict[str, Any] = {}
    for build in (False, True):
        made = partial(model, build=build)
        whole = train(None, model=made, **options)
        with suppress(Fault):
            train(work / f"late-{build}", (1, 2), model=made, **options)
        report[str(build)] = same(train(work / f"late-{build}", model=made, **options), whole)
    try:
        train(work / "late", model=partial(model, build=False, run_eagerly=True), **options)
    except TrainError as error:
        report["refused"] = str(error)
    return report


def unsound(work: Path) -> list[str]:
    """What a `fit` says about pipelines that return other batches when they are read again."""
    import tensorflow as tf

    pipeline = tf.data.Dataset.from_tensor_slices(arrays())
    shuffled = pipeline.shuffle(9, seed=1)
    kept = pipeline.shuffle(9, seed=1, reshuffle_each_iteration=False)

    def of_python(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda rows: rows, [x], "float32"), (5,)), y

    tf.random.set_seed(1)
    seeded = pipeline.map(lambda x, y: (x + tf.random.uniform(()), y))
    with tf.init_scope():
        context = sys.modules["tensorflow.python.eager.context"].context()
        seed, context._seed = context._seed, None
        unseeded = pipeline.map(lambda x, y: (x + tf.random.uniform(()), y))
        context._seed = seed
    sets = [pipeline, seeded, unseeded, pipeline.map(of_python), shuffled.skip(6), kept.skip(6)]
    sets.append(shuffled.cache().shuffle(9, seed=2))
    noise = keras.layers.GaussianNoise(0.1)
    noisy = pipeline.map(lambda x, y: (noise(x, training=True), y))
    sets += [noisy, noisy, pipeline]

    def of_global_seed() -> Any:
        keras.random.normal(())  # makes it
        normal: Any = keras.random.normal
        return pipeline.map(lambda x, y: (x + normal((5,)), y)).batch(6)

    said = []
    for number, data in enumerate(sets):
        source = {4: shuffled, 5: kept}.get(number, pipeline)
        options = {"x": data.batch(6), "validation_data": source.take(6).batch(6), "epochs": 1}
        options |= {8: {"model": partial(unbuilt, noise)}, 9: {"x": of_global_seed}}.get(number, {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(work / f"unsound{number}", **options)
        texts = [str(each.message) for each in caught]
        said.append("".join(text for text in texts if text.startswith("BackupAndRestore")))
    return said


GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "from-tf-train.md"
TENSORFLOWS_GUIDE = """
import tensorflow as tf

class Net(tf.keras.Model):
  def __init__(self):
    super().__init__()
    self.l1 = tf.keras.layers.Dense(5)

  def call(self, x):
    return self.l1(x)

def toy_dataset():
  inputs = tf.range(10.)[:, None]
  labels = inputs * 5. + tf.range(5.)[None, :]
  return tf.data.Dataset.from_tensor_slices(dict(x=inputs, y=labels)).shuffle(10).repeat().batch(2)

def train_step(net, example, optimizer):
  CALLS.append(1)
  if example is FAULT:
    raise KeyError("interrupted")
  with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.abs(net(example["x"]) - example["y"]))
  variables = net.trainable_variables
  optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
  return loss

net = Net()
"""
"""What the loop of TensorFlow's guide "Training checkpoints" stands on."""


def migrated(work: Path) -> dict[str, Any]:
    """The program of the page after its diff: undisturbed, and interrupted before step 28."""
    diff = re.search(r"```diff\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert diff is not None
    program = "".join(f"{line[1:]}\n" for line in diff[1].splitlines() if line[:1] != "-")
    fault = program.replace("  loss =", "  if ckpt.step == 27: example = FAULT\n  loss =")
    assert fault != program
    scope: dict[str, Any] = {}
    for name, programs in (("whole", [program]), ("killed", [fault, program])):
        (work / name).mkdir()
        os.chdir(work / name)
        for code in programs:
            keras.utils.set_random_seed(0)
            scope = {"FAULT": object(), "CALLS": []}
            try:
                exec(TENSORFLOWS_GUIDE + code, scope)
            except KeyError:
                scope["manager"].close()
    runs = [Run(work / name / "tf_ckpts") for name in ("whole", "killed")]
    ends = [run.manifest(5).fingerprint for run in runs]
    try:
        flatten({"data": scope["toy_dataset"]()})
    except UnsupportedLeafError as error:
        return {"ends": ends, "steps": len(scope["CALLS"]), "refused": str(error)}
    raise AssertionError("a dataset has no place")


def refused() -> list[str]:
    """What is said of values that Keras does not count among the variables of a model."""
    import tensorflow as tf

    errors = []
    for value in (
        tf.Variable(tf.constant(1.0)),
        [tf.Variable(tf.constant(1.0))],
        {"key": (tf.Variable(tf.constant(1.0)),)},
        tf.random.Generator.from_seed(1),
        keras.Variable(1.0),  # the control: Keras counts it
    ):
        layer = keras.layers.Dense(1)
        layer.extra = value
        model = keras.Sequential([layer])
        model(np.ones((1, 2)))
        try:
            CheckpointManager(MemoryStorage()).save(1, {"model": model})
        except UnsupportedLeafError as error:
            errors.append(str(error))
    return errors


def main(work: Path) -> None:
    backend = keras.backend.backend()
    report: dict[str, Any] = {"backend": backend}
    if backend == "tensorflow":
        report["resumed"] = killed_and_resumed(work)
        report["augmented"] = augmented_and_resumed(work)
        report["losses"] = losses_resumed(work)
        report["unfrozen"] = unfrozen_and_resumed(work)
        report["late"] = built_late(work)
    report["behaviours"] = check_behaviours(work)
    if backend == "tensorflow":
        report["unsound"] = unsound(work)
        report["migrated"] = migrated(work)
        report["refused"] = refused()
    print(json.dumps(report))  # noqa: T201 (what the test reads)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
