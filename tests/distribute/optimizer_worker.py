"""Trains with an optimizer inside `strategy.run` and writes digests of the weights as JSON."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
from worker_program import answer, arguments

from perdure.data import ArrayDataset
from perdure.distribute import Cluster, compute_average_loss
from perdure.distribute.arrays import on_host
from perdure.errors import StateError

REPLICAS, BATCH, STEPS = 4, 16, 3


def dataset() -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype(np.float32)
    return ArrayDataset({"x": x, "y": (x.sum(1) > 0).astype(np.int32)}, BATCH)


def digest(arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def with_torch(strategy: Any) -> dict[str, Any]:
    """Two networks with an optimizer each, as in a GAN; the second loss reaches both."""
    import torch

    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
    one = torch.optim.Adam(first.parameters(), 1e-2)
    two = torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)

    def step(batch: Any) -> Any:
        for optimizer, target in ((one, batch["y"]), (two, 1 - batch["y"])):
            optimizer.zero_grad()
            scores = second(torch.relu(first(batch["x"])))
            losses = torch.nn.functional.cross_entropy(scores, target.long(), reduction="none")
            loss = compute_average_loss(losses, global_batch_size=BATCH)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(first.parameters(), 0.05)
            optimizer.step()
        return loss.detach()

    losses: Any = None
    for number in range(STEPS):
        losses = strategy.run(step, (strategy.batch(dataset(), number),))
    parameters = [*first.parameters(), *second.parameters()]

    def accumulate(batch: Any) -> None:
        layers = (heads[0], heads[1]) if batch["x"][0, 0] > 0 else (heads[1], heads[0])
        for layer in layers:
            layer(batch["x"]).square().sum().backward()

    # The order of the first uses depends on the data, and differs between processes.
    heads: Any = [torch.nn.Linear(4, 1, bias=False) for _ in range(2)]
    x = np.repeat(np.array([[1, 1], [-2, -2]], np.float32), 4).reshape(4, 4)
    strategy.run(accumulate, (strategy.batch(ArrayDataset({"x": x}, 4, shuffle=False), 0),))
    return {
        "accumulated": [layer.weight.grad.tolist() for layer in heads],
        "weights": digest([p.detach() for p in parameters]),
        "left": digest([p.grad for p in parameters]),
        "loss": digest([strategy.reduce("sum", losses)]),
    }


def with_keras(strategy: Any) -> dict[str, Any]:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(1e-2)

    def gradients(batch: Any) -> Any:
        if keras.backend.backend() == "torch":
            model.zero_grad()
            loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).sum() / BATCH
            loss.backward()
            return [variable.value.grad for variable in model.trainable_variables]
        import jax

        def loss_fn(values: Any) -> Any:
            scores: Any = model.stateless_call(values, [], batch["x"])[0]
            return ((scores[:, 0] - batch["y"]) ** 2).sum() / BATCH

        return jax.grad(loss_fn)([variable.value for variable in model.trainable_variables])

    seen: list[Any] = [keras.metrics.Mean(), keras.metrics.MeanSquaredError()]

    def step(batch: Any) -> None:
        optimizer.apply_gradients(zip(gradients(batch), model.trainable_variables, strict=True))
        seen[0].update_state(batch["x"])
        seen[1](batch["y"][:, None], model(batch["x"]), sample_weight=batch["weight"])

    for number in range(STEPS):
        strategy.run(step, (strategy.batch(dataset(), number),))

    dropout = keras.layers.Dropout(0.5, seed=1)
    refused = ""
    try:
        strategy.run(
            lambda batch: dropout(batch["x"], training=True), (strategy.batch(dataset(), 0),)
        )
    except StateError as error:
        refused = str(error)
    return {
        "weights": digest([on_host(v.value) for v in model.trainable_variables]),
        "iterations": int(optimizer.iterations),
        "refused": refused,
        "metrics": digest([on_host(v.value) for metric in seen for v in metric.variables]),
        "rows": int(seen[1].count),
    }


def main() -> None:
    args = arguments(engine=str)
    kind, _, backend = args.engine.partition("-")
    os.environ["KERAS_BACKEND"] = backend or "torch"
    if backend == "jax":
        import perdure.jax as engine
    else:
        import perdure.torch as engine
    use = with_keras if kind == "keras" else with_torch
    out: dict[str, Any]
    if args.processes > 1:
        cluster = Cluster(args.coordinator, args.processes, args.process)
        out = use(engine.MultiWorkerMirroredStrategy(cluster, REPLICAS))
    else:
        out = {str(d): use(engine.MirroredStrategy(d, REPLICAS)) for d in (1, 2, 4)}
        out["one replica"] = use(engine.MirroredStrategy(1, 1))
    answer(out)


if __name__ == "__main__":
    main()
