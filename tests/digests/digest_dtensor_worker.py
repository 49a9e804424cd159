"""One process of a group with DTensors: `digest_dtensor_worker.py STORE RANK COUNT`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from perdure.digests import digest
from perdure.errors import StateError


def wholes() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return {
        "uneven": torch.randn((7, 3), generator=source).to(torch.bfloat16),
        "one row": torch.randn((1, 5), generator=source),
        "columns": torch.randn((30, 34), generator=source),
        "replicated": torch.randn((4, 4), generator=source),
    }


def placements(name: str, mesh: Any) -> list[Any]:
    if mesh.ndim == 1:
        return [{"columns": Shard(1), "replicated": Replicate()}.get(name, Shard(0))]
    return {
        "uneven": [Replicate(), Shard(0)],
        "one row": [Shard(0), Shard(0)],
        "columns": [Shard(1), Shard(0)],
        "replicated": [Replicate(), Replicate()],
    }[name]


def main() -> None:
    store, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    answer: dict[str, Any] = {}
    for name, shape in (("line", (count,)), ("grid", (2, count // 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])
        state = {
            key: distribute_tensor(whole, mesh, placements(key, mesh))
            for key, whole in wholes().items()
        }
        answer[name] = digest(state) == digest(wholes())
        if rank == count - 1:
            state["columns"].to_local()[-1, -1] += 1
        answer["control"] = digest(state) != digest(wholes())
        summed = DTensor.from_local(torch.ones(3), mesh, [Partial()] * mesh.ndim)
        try:
            digest({"w": summed})
        except StateError as error:
            answer["partial"] = str(error)[:3]
    print(json.dumps(answer), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
