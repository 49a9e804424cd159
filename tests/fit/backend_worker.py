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
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Keras imports these for its own checks if it can, which takes longer than the tests.
if os.environ["KERAS_BACKEND"] == "tensorflow":
    sys.modules.update(sklearn=None, matplotlib=None)  # type: ignore[arg-type]
else:
    sys.modules.update(sklearn=None, matplotlib=None, tensorflow=None)  # type: ignore[arg-type]

import keras
import numpy as np
from cases import End, network, same, train
from keras_behaviours import check_behaviours

from perdure import CheckpointManager
from perdure.errors import UnsupportedLeafError
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
  return tf.data.Dataset.from_tensor_slices(dict(x=inputs, y=labels)).repeat().batch(2)

def train_step(net, example, optimizer):
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
    fault = program.replace("  loss =", "  if step == 27: example = FAULT\n  loss =")
    assert fault != program
    scope: dict[str, Any] = {}
    for name, programs in (("whole", [program]), ("killed", [fault, program])):
        (work / name).mkdir()
        os.chdir(work / name)
        for code in programs:
            keras.utils.set_random_seed(0)
            scope = {"FAULT": object()}
            try:
                exec(TENSORFLOWS_GUIDE + code, scope)
            except KeyError:
                scope["manager"].close()
    ends = [Run(work / name / "ckpts").manifest(50).fingerprint for name in ("whole", "killed")]
    refused = []
    for value in (dataset := scope["toy_dataset"](), iter(dataset)):
        try:
            flatten({"data": value})
        except UnsupportedLeafError as error:
            refused.append(str(error))
    return {"ends": ends, "start": scope["start"], "refused": refused}


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
    resumed = killed_and_resumed(work) if backend == "tensorflow" else None
    report = {"backend": backend, "resumed": resumed, "behaviours": check_behaviours(work)}
    if backend == "tensorflow":
        report["migrated"] = migrated(work)
        report["refused"] = refused()
    print(json.dumps(report))  # noqa: T201 (what the test reads)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
