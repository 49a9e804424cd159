"""Small models and the optimizers of the matrix on PyTorch, written as a user would write them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "torch"

import torch
import torch.nn.functional as F
from matrix_keras import keras_model, keras_optimizer
from torch import nn

from perdure.distribute import LossScale
from perdure.keras import Stateless
from perdure.torch import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    apply_gradients,
    gradients,
)

OPTIMIZERS = ("sgd", "adam", "rmsprop", "adamw")
SEED = 1


class Cell(NamedTuple):
    """The arguments of `strategy.step`, and the function that makes the first state."""

    init: Callable[[], Any]
    grad: Callable[..., Any]
    update: Callable[..., Any]


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    of, parameters = torch.optim, list(model.parameters())
    return {
        "sgd": lambda: of.SGD(parameters, 0.05, momentum=0.9),
        "adam": lambda: of.Adam(parameters, 1e-3),
        "rmsprop": lambda: of.RMSprop(parameters, 1e-3),
        "adamw": lambda: of.AdamW(parameters, schedule(0), weight_decay=0.01),
    }[name]()


def schedule(step: int) -> float:
    """Warm-up and cosine decay as a function of the integer step."""
    return 1e-4 * (step + 1) if step < 2 else 2e-3 * (1 + math.cos(math.pi * step / 10)) / 2


def cell(
    build: Callable[[], nn.Module],
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    ema: float | None = None,
    scaled: bool = False,
) -> Cell:
    def start() -> Any:
        torch.manual_seed(SEED)
        model = build().to(dtype)
        state = {"model": model, "optimizer": optimizer(name, model), "step": 0}
        if ema is not None:
            state["ema"] = {k: v.detach().clone() for k, v in model.named_parameters()}
        if scaled:
            state["loss_scale"] = LossScale(torch.tensor(2.0**24), torch.tensor(0))
        return state

    def grad(state: Any, batch: Any, key: Any) -> Any:
        x = (batch["x"].float() / 255).to(dtype)
        with torch.autocast("cpu", torch.float16, enabled=scaled):
            logits = state["model"].train()(x)
        per_example = F.cross_entropy(logits.float(), batch["y"], reduction="none")
        loss = (per_example * batch["weight"]).sum()
        scale = state["loss_scale"].scale if scaled else 1
        grads = gradients(loss * scale, state["model"])
        return {"grads": grads, "loss": loss, "weight": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        model, weight = state["model"], total["weight"]
        divisor = weight * state["loss_scale"].scale if scaled else weight
        apply_gradients(model, total["grads"], 1 / divisor)
        finite = torch.isfinite(nn.utils.get_total_norm(p.grad for p in model.parameters()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if name == "adamw":
            for group in state["optimizer"].param_groups:
                group["lr"] = schedule(state["step"])
        if finite or not scaled:
            state["optimizer"].step()
        if scaled:
            state["loss_scale"] = state["loss_scale"].after(finite, growth_steps=2)
        if ema is not None:
            with torch.no_grad():
                for key, value in model.named_parameters():
                    state["ema"][key].mul_(ema).add_(value, alpha=1 - ema)
        state["step"] += 1
        return state, {"loss": total["loss"] / weight}

    return Cell(start, grad, update)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
    )


def cnn() -> nn.Module:
    """The network of TensorFlow's custom-training tutorial, with dropout."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 10),
    )  # fmt: skip


def batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 13 * 13, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """A transformer on the rows of an image: 28 tokens, two blocks of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 32)
        self.place = nn.Parameter(torch.randn(28, 32) * 0.1)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(2))
        )
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.embed(x) + self.place).mean(1))


def keras_cell(name: str, replicas: int) -> Cell:
    def loss(net: Any, state: Any, trainable: Any, batch: Any, key: Any) -> Any:
        logits, statistics = net(state, trainable, (batch["x"].float() / 255)[..., None], key)
        per_example = F.cross_entropy(logits, batch["y"], reduction="none")
        return (per_example * batch["weight"]).sum(), statistics

    net = Stateless(keras_model(SEED), keras_optimizer(name))

    def grad(state: Any, batch: Any, key: Any) -> Any:
        trainable = net.trainable(state)
        value, stats = loss(net, state, trainable, batch, key)
        gradients = torch.autograd.grad(value, list(trainable.values()))
        grads = dict(zip(trainable, gradients, strict=True))
        return {"grads": grads, "stats": stats, "loss": value, "weight": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        grads = {path: g / total["weight"] for path, g in total["grads"].items()}
        stats = {path: s / replicas for path, s in total["stats"].items()}
        return net.apply(state, grads, stats), {"loss": total["loss"] / total["weight"]}

    return Cell(net.state, grad, update)


def cells_of(build: Callable[[], nn.Module], **how: Any) -> dict[str, Cell]:
    return {name: cell(build, name, **how) for name in OPTIMIZERS}


MODELS: dict[str, Callable[[int], dict[str, Cell]]] = {
    "MLP, dropout": lambda v: cells_of(mlp),
    "tutorial's CNN": lambda v: cells_of(cnn),
    "CNN, BatchNorm": lambda v: cells_of(batchnorm),
    "transformer, clipping, EMA": lambda v: cells_of(Transformer, clip=0.5, ema=0.9),
    "Keras": lambda v: {name: keras_cell(name, v) for name in OPTIMIZERS},
    "torch module, bfloat16": lambda v: cells_of(mlp, dtype=torch.bfloat16),
    "MLP, float16": lambda v: cells_of(mlp, scaled=True),
}


def make_strategy(devices: str, replicas: int, group: bool, compile: str | None = None) -> Any:
    """`devices` is the number of devices, each of which is a thread."""
    if group:
        return MultiWorkerMirroredStrategy(replicas=replicas, devices=int(devices), compile=compile)
    return MirroredStrategy(int(devices), replicas, compile=compile)
