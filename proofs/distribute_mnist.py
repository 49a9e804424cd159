"""The training of the multi-worker tutorial: its network, RMSprop, 3 epochs of 70 steps, 2 workers.

One worker of the group, on either engine. Prints the training accuracy of each epoch, measured while
the network trains, and the accuracy on the test images. The tutorial has 60,000 images; the given file
may have fewer, which are then seen more than once.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from perdure import ArrayDataset
from perdure.demo.digits import load_digits

REPLICAS = 2
BATCH = 128
EPOCHS = 3
STEPS = 70
L2 = 1e-5


def torch_parts() -> Any:
    """(strategy class, state, grad, update, evaluate) of the tutorial's network on PyTorch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from perdure.torch import MultiWorkerMirroredStrategy, apply_gradients, gradients

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 26 * 26, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):  # as Keras initializes
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    state = {"model": model, "optimizer": torch.optim.RMSprop(model.parameters(), 1e-3, alpha=0.9)}

    def right(logits: Any, batch: Any) -> Any:
        return ((logits.argmax(1) == batch["label"]) * batch["weight"]).sum()

    def grad(state: Any, batch: Any, key: Any) -> Any:
        logits = state["model"](batch["image"].permute(0, 3, 1, 2))
        losses = F.cross_entropy(logits, batch["label"].long(), reduction="none")
        weight = batch["weight"].sum()
        decay = sum((p**2).sum() for n, p in state["model"].named_parameters() if "weight" in n)
        loss = (losses * batch["weight"]).sum() + L2 * decay * weight
        return {
            "grads": gradients(loss, state["model"]),
            "right": right(logits, batch),
            "weight": weight,
        }

    def update(state: Any, total: Any) -> Any:
        apply_gradients(state["model"], total["grads"], 1 / total["weight"])
        state["optimizer"].step()
        return state, (total["right"], total["weight"])

    @torch.no_grad()
    def evaluate(state: Any, batch: Any) -> Any:
        batch = {name: torch.as_tensor(value) for name, value in batch.items()}
        logits = state["model"](batch["image"].permute(0, 3, 1, 2))
        return right(logits, batch), batch["weight"].sum()

    return MultiWorkerMirroredStrategy(replicas=REPLICAS), state, grad, update, evaluate


def jax_parts() -> Any:
    """The same on JAX."""
    from perdure.jax import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(replicas=REPLICAS)
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    tx = optax.rmsprop(1e-3, decay=0.9, eps=1e-7)
    shapes = {"conv": (3, 3, 1, 32), "dense": (32 * 26 * 26, 128), "out": (128, 10)}
    glorot = jax.nn.initializers.glorot_uniform()
    params = {
        name: {"kernel": glorot(key, shape), "bias": jnp.zeros(shape[-1])}
        for (name, shape), key in zip(
            shapes.items(), jax.random.split(jax.random.key(0), 3), strict=True
        )
    }
    numbers = ("NHWC", "HWIO", "NHWC")

    def logits_of(p: Any, x: Any) -> Any:
        x = lax.conv_general_dilated(
            x, p["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=numbers
        )
        x = jax.nn.relu(x + p["conv"]["bias"]).reshape(len(x), -1)
        x = jax.nn.relu(x @ p["dense"]["kernel"] + p["dense"]["bias"])
        return x @ p["out"]["kernel"] + p["out"]["bias"]

    def right(logits: Any, batch: Any) -> Any:
        return ((logits.argmax(1) == batch["label"]) * batch["weight"]).sum()

    def grad(state: Any, batch: Any, key: Any) -> Any:
        weight = batch["weight"].sum()

        def loss(p: Any) -> Any:
            logits = logits_of(p, batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            decay = sum((layer["kernel"] ** 2).sum() for layer in p.values())
            return (losses * batch["weight"]).sum() + L2 * decay * weight, logits

        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"grads": grads, "right": right(logits, batch), "weight": weight}

    def update(state: Any, total: Any) -> Any:
        grads = jax.tree.map(lambda g: g / total["weight"], total["grads"])
        changes, opt = tx.update(grads, state["opt"])
        new = {"params": optax.apply_updates(state["params"], changes), "opt": opt}
        return new, (total["right"], total["weight"])

    @jax.jit
    def evaluate(state: Any, batch: Any) -> Any:
        return right(logits_of(state["params"], batch["image"]), batch), batch["weight"].sum()

    return strategy, {"params": params, "opt": tx.init(params)}, grad, update, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("jax", "torch"), required=True)
    parser.add_argument("--data", required=True)
    options = parser.parse_args()
    digits = load_digits(options.data)
    parts = torch_parts if options.engine == "torch" else jax_parts
    strategy, state, grad, update, evaluate = parts()
    train, test = ArrayDataset(digits.train, BATCH), ArrayDataset(digits.test, BATCH, shuffle=False)
    train_step = strategy.step(grad, update)
    history = []
    for epoch in range(EPOCHS):
        right = weight = 0.0
        for step in range(epoch * STEPS, (epoch + 1) * STEPS):
            state, (correct, of) = train_step(state, strategy.batch(train, step))
            right, weight = right + float(correct), weight + float(of)
        history.append(right / weight)
    right = weight = 0.0
    for step in range(test.steps_per_epoch):
        total = strategy.reduce("sum", strategy.run(evaluate, (state, strategy.batch(test, step))))
        right, weight = right + float(total[0]), weight + float(total[1])
    workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    result = {"event": "history", "training": history, "test": right / weight, "workers": workers}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
