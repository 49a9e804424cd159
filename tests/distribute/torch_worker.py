"""Trains small modules in one process of a group and writes the digests as a JSON line."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from worker_program import answer, arguments

from perdure.data import ArrayDataset
from perdure.distribute import SimpleClusterResolver, Strategy, pytree
from perdure.distribute.reduction import Reduction
from perdure.distribute.torch.engine import TorchEngine
from perdure.errors import WorkerLostError
from perdure.torch import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    apply_gradients,
    gradients,
)

REPLICAS = 8
FIRST = 2
STEPS = 3
BATCH = 4 * REPLICAS


def dataset() -> ArrayDataset:
    rng = np.random.default_rng(7)
    # The last of 5 batches is padded.
    x = rng.integers(0, 256, (4 * BATCH + 9, 28, 28), dtype=np.uint8)
    return ArrayDataset({"x": x, "y": rng.integers(0, 10, len(x))}, BATCH, seed=3)


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


class AllReduce(Reduction):
    """Adds the replicas of a process one after the other, then all processes with gloo's collective."""

    _sum: Any = None

    def push(self, device: int, replica: int, value: Any) -> None:
        self._sum = value if self._sum is None else self._engine.add(self._sum, value)

    def total(self, *, check: bool) -> Any:
        if dist.is_initialized():
            for _, leaf in pytree.flatten(self._sum):
                dist.all_reduce(leaf)
        return self._sum


class ProcessRng(TorchEngine):
    """Numbers the random streams by the position in the process."""

    first = 0

    def grad(self, fn: Any, state: Any, share: Any, stream: Any) -> Any:
        place = stream.replica - self.first
        return super().grad(fn, state, share, stream._replace(replica=place))


class Strided(ArrayDataset):
    """Gives the rows of a batch to the processes in turn."""

    processes = 1

    def indices(self, step: int) -> Any:
        index, weight = super().indices(step)
        order = np.concatenate([np.arange(p, BATCH, self.processes) for p in range(self.processes)])
        return index[order], weight[order]


def controls(strategy: Any) -> dict[str, str]:
    out = {}
    engine = ProcessRng(None, strategy.processes, None)
    engine.first = strategy.local_replicas[0]
    out["rng by process"] = train(Strategy(engine, REPLICAS), "cnn")
    data = dataset()
    strided = Strided(
        {name: data._arrays[name] for name in ("x", "y")}, data.batch_size, seed=data.seed
    )
    strided.processes = strategy.processes.count
    out["strided rows"] = train(strategy, "cnn", strided)
    plan = strategy._plan
    plan.reduction = lambda: AllReduce(plan)
    out["all_reduce"] = train(strategy, "cnn")
    return out


def main() -> None:
    args = arguments(devices=1, die_at=int)
    if args.processes > 1:
        cluster = SimpleClusterResolver(args.coordinator, args.processes, args.process)
        strategy: Any = MultiWorkerMirroredStrategy(cluster, REPLICAS, devices=args.devices)
    else:
        strategy = MirroredStrategy(args.devices, REPLICAS)
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
        out["controls"] = controls(strategy)
    answer(out)


if __name__ == "__main__":
    main()
