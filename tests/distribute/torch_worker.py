"""Trains small modules in one process of a group and writes the digests as a JSON line."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from training_case import FIRST, REPLICAS, STEPS, dataset, strided
from worker_program import answer, arguments

from perdure.demo import program as guards
from perdure.demo.train_torch import all_reduce
from perdure.distribute import SimpleClusterResolver
from perdure.errors import WorkerLostError
from perdure.torch import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    apply_gradients,
    gradients,
)


def cnn() -> nn.Module:
    """The network of TensorFlow's custom-training tutorial, with dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 10),
    )  # fmt: skip


def batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 13 * 13, 10),
    )  # fmt: skip


MODELS = {"cnn": cnn, "batchnorm": batchnorm}


def make_state(model: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = MODELS[model]()
    return {"model": module, "optimizer": torch.optim.Adam(module.parameters(), 1e-3)}


def grad(state: Any, batch: Any, key: Any) -> Any:
    logits = state["model"](batch["x"][:, None].float() / 255)
    loss = (F.cross_entropy(logits, batch["y"], reduction="none") * batch["weight"]).sum()
    weight = batch["weight"].sum()
    correct = ((logits.argmax(1) == batch["y"]) * batch["weight"]).sum()
    return {
        "grads": gradients(loss, state["model"]),
        "loss": (loss, weight),
        "accuracy": (correct, weight),
    }


def update(state: Any, total: Any) -> Any:
    loss, weight = total["loss"]
    apply_gradients(state["model"], total["grads"], 1 / weight)
    state["optimizer"].step()
    return state, {"loss": loss / weight, "accuracy": total["accuracy"][0] / weight}


def digest(state: Any, logs: Any) -> str:
    """SHA-256 over path, dtype, shape and bytes of every tensor of module, optimizer and logs."""
    total = hashlib.sha256()
    tensors = {f"model/{k}": v for k, v in state["model"].state_dict().items()}
    for index, entry in state["optimizer"].state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{k}": v for k, v in entry.items()}
    tensors |= {f"logs/{k}": v for k, v in logs.items()}
    for name in sorted(tensors):
        array = tensors[name].detach().numpy()
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:16]


def train(strategy: Any, model: str, data: Any = None, die_at: int | None = None) -> str:
    data, state, train_step = data or dataset(), make_state(model), strategy.step(grad, update)
    logs: Any = {}
    for step in range(FIRST, FIRST + STEPS):
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        state, logs = train_step(state, strategy.batch(data, step))
    return digest(state, logs)


# --- negative controls: each removes one guard, and its result must depend on the topology ---


def controls(make: Any, processes: int) -> dict[str, str]:
    strategies = [make() for _ in range(3)]
    guards.sums_by_all_reduce(strategies[0], all_reduce)
    guards.random_numbers_by_device(strategies[1])
    return {
        "all_reduce": train(strategies[0], "cnn"),
        "rng by process": train(strategies[1], "cnn"),
        "strided rows": train(strategies[2], "cnn", strided(processes)),
    }


def main() -> None:
    args = arguments(devices=1, die_at=int)

    def make() -> Any:
        if args.processes == 1:
            return MirroredStrategy(args.devices, REPLICAS)
        cluster = SimpleClusterResolver(args.coordinator, args.processes, args.process)
        return MultiWorkerMirroredStrategy(cluster, REPLICAS, devices=args.devices)

    strategy = make()
    if args.die_at is not None:
        try:
            train(strategy, "cnn", die_at=args.die_at if args.process else None)
        except WorkerLostError as error:
            answer({"lost": str(error)})
            os._exit(0)
    out: dict[str, Any] = {model: train(strategy, model) for model in MODELS}
    out["recipe"] = strategy.recipe(dataset())
    total = strategy.reduce(
        "sum",
        strategy.run(lambda key: torch.randn(5, generator=key), (strategy.keys(STEPS),)),
    )
    out["reduce"] = total.numpy().tobytes().hex()
    out["agree"] = [
        strategy.processes.any(args.process == 1),
        strategy.processes.channel("save")
        .broadcast(b"from 0" if args.process == 0 else None)
        .decode(),
        [part.decode() for part in strategy.processes.gather(str(args.process).encode())],
    ]
    if args.devices == 1:
        out["controls"] = controls(make, args.processes)
    answer(out)


if __name__ == "__main__":
    main()
