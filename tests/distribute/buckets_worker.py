"""One process of a group that trains by DDP, with the gradients of each step, in one run or two."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from worker_program import answer, arguments

import perdure
from perdure.errors import StateError
from perdure.torch import LogicalReplicas, process_group

STEPS, MIDDLE = 3, 1


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), **options)


def train(directory: str, stop: int, *, arranged: bool = True, **options: Any) -> list[list[Any]]:
    """Resume the run in the directory and train to `stop`; the gradients of each step."""
    processes, ddp, gradients = process_group(), made(**options), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    state = {"model": ddp if arranged else ddp.module, "optimizer": optimizer}
    with perdure.CheckpointManager(directory, processes=processes) as manager:
        _, start = manager.restore_or_initialize(state)
        assert all(parameter.grad is None for parameter in ddp.parameters())
        for step in range(start, stop):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + processes.index)
            x = torch.randn(4, 8, generator=generator)
            (ddp(x) - x).square().mean().backward()
            gradients.append([parameter.grad.tolist() for parameter in ddp.parameters()])
            optimizer.step()
            manager.save(step + 1, state)
    return gradients


def is_exact(directory: str, **options: Any) -> bool:
    whole = train(f"{directory}/whole", STEPS, **options)
    parts = train(f"{directory}/parts", MIDDLE, **options)
    return whole == parts + train(f"{directory}/parts", STEPS, **options)


def logical_replicas(directory: str) -> bool:
    """Whether a DDP whose buckets are arranged takes `LogicalReplicas` and has its bits."""
    found = []
    for is_late in (False, True):
        ddp = made()
        replicas = None if is_late else LogicalReplicas(ddp, 6)
        with perdure.CheckpointManager(
            f"{directory}/{is_late}", processes=process_group(), recipe={"replicas": 6}
        ) as manager:
            manager.restore_or_initialize({"model": ddp})
        for replica in replicas or LogicalReplicas(ddp, 6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(replica))
            ddp(x).square().mean().backward()
        found.append([parameter.grad.tolist() for parameter in ddp.parameters()])
    return found[0] == found[1]


def refused(directory: str) -> str:
    try:
        train(directory, 1, static_graph=True)
    except StateError as error:
        return str(error)
    return ""


def warned(directory: str) -> list[str]:
    """The warnings of a save with a model that no restore has seen."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with perdure.CheckpointManager(directory, processes=process_group()) as manager:
            manager.save(1, {"model": made()})
    return [str(each.message) for each in found]


def main() -> None:
    options = arguments(directory="")
    index, count = options.process, options.processes
    dist.init_process_group(
        "gloo", init_method=f"tcp://{options.coordinator}", rank=index, world_size=count
    )
    at = options.directory
    answer(
        {
            "exact": is_exact(f"{at}/exact"),
            "views": is_exact(f"{at}/views", gradient_as_bucket_view=True),
            "unused": is_exact(f"{at}/unused", find_unused_parameters=True),
            "not arranged": is_exact(f"{at}/not", arranged=False),
            "logical replicas": logical_replicas(f"{at}/replicas"),
            "refused": refused(f"{at}/refused"),
            "warned": warned(f"{at}/warned"),
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
