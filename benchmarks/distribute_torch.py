"""Training steps on PyTorch: perdure's exact ones, plain ones and DistributedDataParallel."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from distribute_case import WIDE, Group, data
from torch import nn

from perdure.distribute import PerReplica, SimpleClusterResolver, Strategy
from perdure.distribute.reduction_tree import TreeNode, TreeSum
from perdure.distribute.torch.engine import TorchEngine
from perdure.torch import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    apply_gradients,
    gradients,
)

Step = Callable[[], float]


class Transformer(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(32, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 256)

    def forward(self, x: Any) -> Any:
        h = self.embed(x) + self.place
        for block in self.blocks:
            h = block(h)
        return self.out(h).transpose(1, 2)


class Images(nn.Sequential):
    """Images in the memory format of TensorFlow, channels last."""

    def forward(self, input: Any) -> Any:
        return super().forward(input[:, None].contiguous(memory_format=torch.channels_last))


class Recurrent(nn.Module):
    """The rows of an image, one after another."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.gru = nn.GRU(28, width, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        return self.out(self.gru(x)[0][:, -1])


class Residual(nn.Linear):
    def forward(self, input: Any) -> Any:
        return input + F.relu(super().forward(input))


def make(model: str) -> nn.Module:
    torch.manual_seed(0)
    if model == "transformer":
        return Transformer()
    if model == "gru":
        return Recurrent()
    if model == "scan8":
        layers = [nn.Flatten(), nn.Linear(784, 256), nn.ReLU()]
        layers += [Residual(256, 256) for _ in range(8)]
        return nn.Sequential(*layers, nn.Linear(256, 10))
    if model == "wide":
        layers = [nn.Flatten()]
        for sizes in itertools.pairwise(WIDE):
            layers += [nn.Linear(*sizes), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
    if model == "mlp":
        layers = [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*layers)
    # The network of TensorFlow's custom-training tutorial.
    images = Images(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return images.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def grad(state: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    loss = F.cross_entropy(state["model"](x), y.long(), reduction="sum")
    return {"grads": gradients(loss, state["model"]), "loss": loss, "n": torch.tensor(y.numel())}


def update(state: Any, total: Any) -> Any:
    apply_gradients(state["model"], total["grads"], 1 / total["n"])
    state["optimizer"].step()
    # As a plain loop does: no gradient is alive beside the next ones.
    state["optimizer"].zero_grad()
    return state, total["loss"] / total["n"]


def _state(model: str) -> Any:
    module = make(model)
    return {"model": module, "optimizer": torch.optim.Adam(module.parameters(), 1e-3)}


def _exact(strategy: Any, model: str, batch: int) -> Step:
    x, y = data(model, batch)
    v = strategy.num_replicas_in_sync
    xs, ys = np.split(x, v), np.split(y, v)
    mine = strategy.local_replicas
    train_step, state, count = strategy.step(grad, update), _state(model), iter(range(10**9))

    def step() -> float:
        share = PerReplica(tuple((xs[r], ys[r]) for r in mine), mine, next(count))
        return float(train_step(state, share)[1])

    return step


def exact(
    group: Group, model: str, batch: str, replicas: str, devices: str = "1", threads: str = "1"
) -> Step:
    how: Any = {"devices": int(devices), "threads": int(threads)}
    if group.processes == 1:
        strategy: Any = MirroredStrategy(replicas=int(replicas), **how)
    else:
        cluster = SimpleClusterResolver(group.coordinator, group.processes, group.process)
        strategy = MultiWorkerMirroredStrategy(cluster, int(replicas), **how)
    return _exact(strategy, model, int(batch))


def compiled(group: Group, model: str, batch: str, replicas: str) -> Step:
    strategy = MirroredStrategy(replicas=int(replicas), threads=1, compile="inductor")
    return _exact(strategy, model, int(batch))


def split(group: Group, model: str, batch: str, replicas: str) -> Step:
    """The calls and additions of the replicas without a strategy: what PyTorch itself takes."""
    torch.set_num_threads(1)
    (x, y), v, state = data(model, int(batch)), int(replicas), _state(model)
    xs, ys = np.split(x, v), np.split(y, v)
    key = torch.Generator()

    def add(left: list[Any], right: list[Any]) -> list[Any]:
        return list(torch._foreach_add(left, right))  # pyright: ignore[reportPrivateImportUsage]

    def contribution(replica: int) -> tuple[list[Any], list[str]]:
        share = torch.from_numpy(xs[replica]), torch.from_numpy(ys[replica])
        value = grad(state, share, key)
        return [*value["grads"].values(), value["loss"].detach(), value["n"]], [*value["grads"]]

    def step() -> float:
        tree: TreeSum[list[Any]] = TreeSum(v, add)
        names: list[str] = []
        for replica in range(v):
            value, names = contribution(replica)
            tree.push(TreeNode(0, replica), value)
            del value
        ((_, (*grads, loss, n)),) = tree.roots()
        del tree
        total = {"grads": dict(zip(names, grads, strict=True)), "loss": loss, "n": n}
        del grads
        return float(update(state, total)[1])

    return step


def plain_compiled(group: Group, model: str, batch: str) -> Step:
    torch.set_num_threads(1)
    return _plain(torch.compile(make(model), dynamic=False), *data(model, int(batch)))


def plain(group: Group, model: str, batch: str, threads: str = "1") -> Step:
    """The whole batch at once, as in a loop without a strategy."""
    torch.set_num_threads(int(threads))
    return _plain(make(model), *data(model, int(batch)))


def _plain(module: Any, x: Any, y: Any) -> Step:
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y).long())
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def ddp(group: Group, model: str, batch: str, threads: str = "1") -> Step:
    torch.set_num_threads(int(threads))
    host, port = group.coordinator.split(":")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=group.process,
        world_size=group.processes,
    )
    x, y = (np.split(part, group.processes)[group.process] for part in data(model, int(batch)))
    return _plain(nn.parallel.DistributedDataParallel(make(model)), x, y)


class _Counting(TorchEngine):
    """Counts the contributions and partial sums alive at once, by their largest tensor."""

    alive = most = 0

    def _born(self, value: Any) -> Any:
        self.alive += 1
        self.most = max(self.most, self.alive)
        largest = max(value["contributions"]["grads"].values(), key=torch.numel)
        weakref.finalize(largest, self._died)
        return value

    def _died(self) -> None:
        self.alive -= 1

    def grad(self, fn: Any, state: Any, share: Any, stream: Any) -> Any:
        return self._born(super().grad(fn, state, share, stream))

    def add(self, left: Any, right: Any) -> Any:
        return self._born(super().add(left, right))


def live_contributions() -> dict[int, int]:
    """The largest number of copies of the gradients at once in a step, by number of replicas."""
    most = {}
    for replicas in (1, 2, 3, 4, 7, 8, 16, 32, 64):
        engine = _Counting(None, MirroredStrategy().processes, 1)
        _exact(Strategy(engine, replicas), "mlp", 2 * replicas)()
        most[replicas] = engine.most
    return most
