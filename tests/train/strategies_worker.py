"""A Trainer over the strategies of one engine: prints the fingerprints of every run as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from problem import Spy, prints

from perdure import ArrayDataset, Checkpoint, RunConfig, Trainer
from perdure.train import OutputConfig

STEPS, SAVES, V = 6, 2, 4


def data() -> ArrayDataset:
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    return ArrayDataset({"x": x}, batch_size=16, seed=1)


def pipelines(strategy: Any) -> Any:
    """The same batches from `distribute_datasets_from_function`."""
    source = data()

    def dataset_fn(context: Any) -> Any:
        replica, count = context.input_pipeline_id, context.num_input_pipelines
        return [source.batch(step, replica, count) for step in range(STEPS)]

    return strategy.distribute_datasets_from_function(dataset_fn, source.recipe())


def on_torch(devices: int) -> tuple[Any, Any, Any]:
    import torch

    from perdure.torch import MirroredStrategy, apply_gradients, gradients

    strategy = MirroredStrategy(devices, V)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        loss = (state.model(batch["x"])[:, 0] ** 2 * batch["weight"]).sum()
        return {"grads": gradients(loss, state.model), "loss": loss, "n": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        apply_gradients(state.model, total["grads"], 1 / total["n"])
        state.optimizer.step()
        return state, {"loss": total["loss"] / total["n"]}

    return strategy, strategy.step(grad, update), Checkpoint(model=model, optimizer=optimizer)


def on_jax(devices: int) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    from perdure.jax import MirroredStrategy

    strategy = MirroredStrategy(devices, V)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(w: Any) -> Any:
            kept = jax.random.bernoulli(key, 0.8, batch["x"].shape)
            return ((batch["x"] * kept @ w) ** 2 * batch["weight"]).sum()

        value, grads = jax.value_and_grad(loss)(state["w"])
        return {"w": grads, "loss": value, "n": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        moment = 0.9 * state["moment"] + total["w"] / total["n"]
        new = {"w": state["w"] - 0.1 * moment, "moment": moment}
        return new, {"loss": total["loss"] / total["n"]}

    state = {"w": jnp.ones(3), "moment": jnp.zeros(3)}
    return strategy, strategy.step(grad, update), state


ENGINES = {"jax": on_jax, "torch": on_torch}


def train(
    engine: str, where: Path, devices: int, *, fail_after: int | None = None, batches: Any = None
) -> Any:
    """Train and return the fingerprints by step; those of a failed run end at its last checkpoint."""
    strategy, step, state = ENGINES[engine](devices)
    config = RunConfig(where, save_checkpoints_steps=SAVES, output=OutputConfig(progress="off"))
    source = data() if batches is None else batches(strategy)
    made = Trainer(step, state, source, config, [Spy(fail_after)], strategy=strategy)
    try:
        made.train(STEPS)
    except RuntimeError as error:
        assert str(error) == f"planned at step {fail_after}"  # noqa: PT017
    return prints(where)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        work, (engine,) = Path(directory), sys.argv[1:]
        fingerprints = {
            "1 device": train(engine, work / "1", 1),
            "2 devices": train(engine, work / "2", 2),
            "from a function": train(engine, work / "fn", 2, batches=pipelines),
            "interrupted": train(engine, work / "resumed", 2, fail_after=3),
            "resumed": train(engine, work / "resumed", 1),
        }
    sys.stdout.write(json.dumps(fingerprints) + "\n")


if __name__ == "__main__":
    main()
