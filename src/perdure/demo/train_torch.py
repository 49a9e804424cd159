"""The demo's training program on PyTorch: a hand-written loop, as a user would write it.

The network is that of TensorFlow's custom-training tutorial, with dropout.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.functional import cross_entropy

from perdure import Checkpoint
from perdure.demo.program import main
from perdure.torch import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    apply_gradients,
    gradients,
)

DROPOUT = 0.3


def init(seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = {"sum": torch.zeros(()), "weight": torch.zeros(())}
    return Checkpoint(model=model, optimizer=optimizer, step=0, loss=loss)


def grad(state: Any, batch: Any, _key: Any) -> Any:
    """Sums over the examples of one logical replica; dropout draws from the seeded generator."""
    logits = state.model.train()(batch["image"].permute(0, 3, 1, 2))
    losses = cross_entropy(logits, batch["label"].long(), reduction="none")
    loss = (losses * batch["weight"]).sum()
    total = {"sum": loss.detach(), "weight": batch["weight"].sum()}
    return {"grads": gradients(loss, state.model), "loss": total}


def update(state: Any, total: Any) -> tuple[Any, Any]:
    apply_gradients(state.model, total["grads"], 1 / total["loss"]["weight"])
    state.optimizer.step()
    state.step += 1
    state.loss = {name: state.loss[name] + total["loss"][name] for name in state.loss}
    return state, total["loss"]


@torch.no_grad()
def evaluate(state: Any, batch: Any) -> Any:
    logits = state.model.eval()(torch.as_tensor(batch["image"]).permute(0, 3, 1, 2))
    weight = torch.as_tensor(batch["weight"])
    right = (logits.argmax(-1) == torch.as_tensor(batch["label"])) * weight
    return {"right": right.sum(), "weight": weight.sum()}


def make_strategy(devices: int, replicas: int, seed: int, group: bool) -> Any:
    if group:
        return MultiWorkerMirroredStrategy(replicas=replicas, seed=seed)
    return MirroredStrategy(devices, replicas=replicas, seed=seed)


def all_reduce(engine: Any, values: list[Any]) -> Any:
    """What the demo shows not to do: the framework's sum over processes."""
    if engine.processes.count > 1:
        engine.trees.map(torch.distributed.all_reduce, values[0])
    return values[0]


if __name__ == "__main__":
    main(sys.modules[__name__])
