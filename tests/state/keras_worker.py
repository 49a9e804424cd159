"""Keras 3 objects as state, on the backend that the environment names; prints the results as JSON.

Run as a program: a process has one Keras backend.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from perdure import Checkpoint, CheckpointManager
from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.keras import Stateless
from perdure.state import flatten, restore
from perdure.state.extra_members import ExtraMembers
from perdure.state.walk import Walk
from perdure.store.leaf import Leaves

X = np.random.default_rng(0).normal(size=(8, 6, 6, 1)).astype("float32")
Y = np.arange(8, dtype="int32") % 3


def model(units: int = 3) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(2, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(4, activation="relu"),
            layers.Dropout(0.3, seed=6),
            layers.Dense(units),
        ]
    )


def compiled() -> Any:
    made = model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(1e-2), loss)
    made.optimizer.build(made.trainable_variables)
    return Checkpoint(model=made, optimizer=made.optimizer)


def bits(state: Any) -> dict[str, str]:
    return {
        path: f"{leaf.dtype}{list(leaf.shape)} {bytes(leaf.data).hex()}"
        for path, leaf in flatten(state).items()
    }


def train(members: Any, steps: int) -> None:
    for _ in range(steps):
        members.model.train_on_batch(X, Y)


def refused(work: Any, kind: type[Exception]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    return "nothing was raised"


class Custom(keras.Model):
    """A model with layers as attributes and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.blocks = [keras.layers.Dense(4) for _ in range(2)]

    def call(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def main(where: Path) -> None:
    out: dict[str, Any] = {"backend": keras.backend.backend()}
    out["paths"] = list(flatten(compiled()))
    out["paths again"] = list(flatten(compiled()))
    custom = [Custom(), Custom()]
    for network in custom:
        network(np.ones((1, 4), "float32"))
    out["custom"] = [list(flatten(model)) for model in custom]
    with_functional = keras.Input((4,))
    functional = keras.Model(with_functional, keras.layers.Dense(2, name="head")(with_functional))
    out["functional"] = list(flatten(functional))

    # Exact resume of Keras's own training, dropout included.
    straight = compiled()
    train(straight, 2)
    saved = {path: leaf.copy() for path, leaf in flatten(straight).items()}
    train(straight, 2)
    resumed = compiled()
    train(resumed, 1)
    out["control: other weights"] = bits(resumed) != bits(straight)
    restore(resumed, saved)
    train(resumed, 2)
    out["resumed equal"] = bits(resumed) == bits(straight)

    extras = ExtraMembers(save_random_state=False)  # training leaves gradients in PyTorch's tensors
    out["extra"] = list(extras.capture(Walk({"m": resumed}), Leaves(), 0))
    if out["backend"] == "torch":
        out["control: has gradients"] = resumed.model.trainable_variables[0].value.grad is not None

    metric = keras.metrics.SparseTopKCategoricalAccuracy(k=2)
    metric.update_state([1, 0], [[0.1, 0.3, 0.4], [0.5, 0.2, 0.1]])
    seed, variable = keras.random.SeedGenerator(7), keras.Variable(2.5)
    seed.next()
    parts = {"metric": metric, "seed": seed, "variable": variable}
    out["parts"] = bits(parts)
    kept = {path: leaf.copy() for path, leaf in flatten(parts).items()}
    metric.reset_state()
    seed.next()
    variable.assign(1.0)
    out["parts changed"] = bits(parts) != out["parts"]
    out["parts in place"] = restore(parts, kept)["metric"] is metric and bits(parts) == out["parts"]

    out["misfit"] = refused(lambda: restore(model(4), flatten(model())), MismatchError)
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    out["unbuilt model"] = refused(lambda: flatten({"m": unbuilt}), UnsupportedLeafError)
    fresh = keras.optimizers.SGD()
    out["unbuilt optimizer"] = refused(lambda: flatten({"o": fresh}), UnsupportedLeafError)
    out["no optimizer"] = refused(
        lambda: Stateless(model()).apply({"model": {}}, {}, {}), StateError
    )

    if keras.backend.backend() == "torch":
        import torch

        wrapped = Custom()
        wrapped.inner = torch.nn.BatchNorm1d(3)
        wrapped(np.ones((1, 4), "float32"))
        out["buffers"] = refused(lambda: flatten({"m": wrapped}), UnsupportedLeafError)

    # The tree of a strategy and the objects themselves are one state.
    net = Stateless(straight.model, straight.optimizer)
    out["stateless equal"] = bits(net.state()) == bits(straight)
    other = compiled()
    Stateless(other.model, other.optimizer).write(net.state())
    out["written equal"] = bits(other) == bits(straight)

    # The generator that layers without a seed draw from, outside `fit`.
    def drawn() -> list[float]:
        numbers: Any = keras.random.uniform((3,))
        return numbers.tolist()

    drawn()
    with CheckpointManager(where.with_name(f"{where.name}-{keras.backend.backend()}")) as manager:
        manager.save(1, {"x": 1})
        out["drawn"] = [drawn(), drawn()]
        manager.restore(1)
        out["drawn again"] = [drawn(), drawn()]

    # Attributes come back where each step reads them.
    attributed = where.with_name(f"{where.name}-attributes-{keras.backend.backend()}")
    out["attributes"] = []
    for number in range(2):
        made = compiled()
        with CheckpointManager(attributed) as manager:
            manager.restore_or_initialize(made)
            if not number:
                made.model.layers[3].rate, made.model.layers[4].steps = 0.5, [1, 2]
                made.model.layers[-1].trainable = False
                made.optimizer.clipnorm = 2.0
                manager.save(1, made)
        layers = made.model.layers
        steps = list(getattr(layers[4], "steps", ()))
        trained = len(made.model.trainable_variables)
        out["attributes"].append([layers[3].rate, steps, trained, made.optimizer.clipnorm])

    # Parts: another head keeps its value, and the optimizer its whole state.
    parts = where.with_name(f"{where.name}-parts-{keras.backend.backend()}")
    with CheckpointManager(parts) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save(1, straight)
        manager.wait_until_finished()
        wide = model(units=7)
        adam = keras.optimizers.Adam(0.5)
        adam.build(wide.trainable_variables)
        like = {"model": wide, "optimizer": adam}
        before = bits(like)
        report = manager.restore(like=like, strict=False).report
        out["part report"] = [report.mismatched[:2], report.kept_whole]
        after, saved = bits(like), bits(straight)
        out["part restored"] = [path for path in saved if after[path] == saved[path]]
        out["part kept"] = [path for path in saved if after[path] == before[path]]

    # Across backends: the first process saves, the other restores.
    if (where / "checkpoints").is_dir():
        restored = compiled()
        restored.restore(where)
        out["shared"] = bits(restored)
    else:
        straight.save(where, 4)
        out["shared"] = bits(straight)
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
