"""What a step of `LogicalReplicas` costs: a process of a group, against plain DDP on the same examples.

    doors_replicas.py STEPS     with the environment of torchrun

Both do 12 replicas a step, with the forward and backward passes of a multilayer perceptron of 2.1
million parameters; plain DDP accumulates the gradients of its replicas in `no_sync()`. They take turns.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from doors_measure import Figures, report
from torch.nn.parallel import DistributedDataParallel

from perdure.torch import LogicalReplicas

REPLICAS, EXAMPLES, WIDTH = 12, 32, 1024


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    return DistributedDataParallel(torch.nn.Sequential(*layers))


def step(ddp: Any, optimizer: Any, replicas: Any) -> None:
    optimizer.zero_grad()
    for replica in replicas:
        torch.manual_seed(replica)
        is_last = isinstance(replicas, LogicalReplicas) or replica == replicas[-1]
        with nullcontext() if is_last else ddp.no_sync():
            ddp(torch.randn(EXAMPLES, WIDTH)).square().mean().backward()
    optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    local = REPLICAS // count
    plain, logical = model(), model()
    subjects = {
        "DDP": (plain, range(rank * local, (rank + 1) * local)),
        "LogicalReplicas": (logical, LogicalReplicas(logical, REPLICAS)),
    }
    optimizers = {name: torch.optim.SGD(ddp.parameters()) for name, (ddp, _) in subjects.items()}
    out: dict[str, Figures] = {name: {"step": [], "step cpu": []} for name in subjects}
    for number in range(int(sys.argv[1]) + 2):
        for name, (ddp, replicas) in subjects.items():
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            step(ddp, optimizers[name], replicas)
            dist.barrier()
            if number >= 2:
                out[name]["step"].append(time.perf_counter() - start)
                out[name]["step cpu"].append(time.process_time() - cpu)
    dist.destroy_process_group()
    report(out)


if __name__ == "__main__":
    main()
