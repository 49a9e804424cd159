"""One process of a group that trains by logical replicas under DDP and FSDP2, or by DDP alone."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_program import answer, arguments

import perdure
from perdure.errors import PerdureError
from perdure.torch import LogicalReplicas, process_group

COUNT, STEPS = 12, 2
FEW = 4  # one for each of four processes, where no gradient is added to another one
WIDE = 520  # the weights take more than the first bucket of DDP, 1 MiB


class Net(torch.nn.Module):
    def __init__(self, memory_format: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDE, WIDE)
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(WIDE, 3)
        self.conv: Any = torch.nn.Conv2d(2, 3, 2)
        self.conv.to(memory_format=memory_format)
        self.dead = torch.nn.Parameter(torch.ones(4))  # its gradients are -0.0

    def forward(self, x: Any) -> Any:
        y = self.last(self.drop(torch.relu(self.first(x))))
        image = x[:, :32].reshape(-1, 2, 4, 4)
        return y.square().mean() + self.conv(image).square().mean() - (self.dead * 0.0).sum()


def batch(step: int, replica: int) -> Any:
    torch.manual_seed(1000 * step + replica)  # of the dropout too
    return torch.randn(2, WIDE)


def made(memory_format: Any = torch.contiguous_format, **options: Any) -> Any:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(memory_format), bucket_cap_mb=1, **options)


def sharded(*shape: int) -> Any:
    torch.manual_seed(0)
    net = Net(torch.contiguous_format)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    for module in (net.first, net.last, net):
        fully_shard(module, mesh=mesh)
    return net


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        for value in (parameter.detach(), parameter.grad):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(whole.contiguous().numpy().tobytes())
    return found.hexdigest()


def train(ddp: Any, replicas: Any, *, clear: bool = True, clip: bool = True) -> str:
    steps(ddp, replicas, torch.optim.AdamW(ddp.parameters(), lr=0.01), 0, STEPS, clear, clip)
    return digest(ddp)


def steps(
    ddp: Any, replicas: Any, optimizer: Any, start: int, stop: int, clear: bool, clip: bool
) -> None:
    for step in range(start, stop):
        optimizer.zero_grad(set_to_none=clear)
        for replica in replicas:
            last = isinstance(replicas, LogicalReplicas) or replica == replicas[-1]
            with nullcontext() if last else ddp.no_sync():
                ddp(batch(step, replica)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()


def accumulated(count: int) -> list[str]:
    """The gradients of two loops without a step: of DDP, with views of buckets, and of FSDP2.

    Then those of DDP with two batches in each replica.
    """
    found = []
    for kind in ("ddp", "views", "fsdp", "no_sync"):
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(8, 3)
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view=kind == "views")
        replicas = LogicalReplicas(model, COUNT)
        for step in (0, 1):
            for replica in replicas:
                with model.no_sync() if kind == "no_sync" else nullcontext():
                    model(batch(step, replica)[:, :8]).square().mean().backward()
                if kind == "no_sync":
                    model(batch(step + 2, replica)[:, :8]).square().mean().backward()
        found.append(digest(model))
    return found


def continued(directory: str) -> str:
    """Begin a run and save its first step, or finish the run that is in the directory."""
    processes = process_group()
    ddp = made()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    replicas = LogicalReplicas(ddp, COUNT)
    options = perdure.ManagerOptions(save_random_state=False)
    with perdure.CheckpointManager(
        directory, processes=processes, options=options, recipe={"replicas": COUNT}
    ) as manager:
        state = perdure.Checkpoint(model=ddp, optimizer=optimizer)
        _, start = manager.restore_or_initialize(state)
        steps(ddp, replicas, optimizer, start, start + 1, clear=True, clip=False)
        manager.save(start + 1, state)
    return digest(ddp)


def refused(action: Any) -> str:
    try:
        action()
    except (PerdureError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors() -> dict[str, str]:
    def steps(backwards: int) -> None:
        ddp = made()
        for replica in LogicalReplicas(ddp, COUNT):
            for _ in range(backwards):
                ddp(batch(0, replica)).backward()

    def outside() -> None:
        ddp = made()
        LogicalReplicas(ddp, COUNT)
        ddp(batch(0, 0)).backward()

    def left() -> None:
        ddp = made()
        replicas = LogicalReplicas(ddp, COUNT)
        for replica in replicas:
            ddp(batch(0, replica)).backward()
            break
        assert all(parameter.grad is None for parameter in ddp.parameters())
        next(iter(replicas))

    def hook() -> None:
        ddp = made()
        LogicalReplicas(ddp, COUNT)
        LogicalReplicas(ddp, COUNT)

    return {
        "hook": refused(hook),
        "left": refused(left),
        "outside": refused(outside),
        "without_backward": refused(lambda: steps(0)),
        "twice": refused(lambda: steps(2)),
        "multiple": refused(lambda: LogicalReplicas(made(), COUNT + 1)),
        "two_dimensions": refused(lambda: LogicalReplicas(sharded(2, 1), COUNT)),
        "neither": refused(lambda: LogicalReplicas(Net(torch.contiguous_format), COUNT)),
        "unused": refused(lambda: LogicalReplicas(made(find_unused_parameters=True), COUNT)),
    }


def main() -> None:
    options = arguments(errors=0, directory="")
    index, count = options.process, options.processes
    dist.init_process_group(
        "gloo", init_method=f"tcp://{options.coordinator}", rank=index, world_size=count
    )
    local = COUNT // count
    out: dict[str, Any] = {"bits": [], "errors": errors() if options.errors else {}}
    for view in (False, True):
        ddp = made(torch.channels_last, gradient_as_bucket_view=view)
        out["bits"].append(train(ddp, LogicalReplicas(ddp, COUNT), clear=not view))
    out["plain"] = train(made(), range(index * local, (index + 1) * local))
    for name, model in (("ddp", made()), ("fsdp", sharded(count))):
        out[name] = train(model, LogicalReplicas(model, COUNT), clip=False)
    out["accumulated"] = accumulated(count)
    if FEW % count == 0:
        models = made(), sharded(count)
        out["few"] = [train(model, LogicalReplicas(model, FEW), clip=False) for model in models]
    if options.directory:
        out["continued"] = continued(options.directory)
    answer(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
