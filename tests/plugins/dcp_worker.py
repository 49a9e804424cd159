"""A training loop whose checkpoints DCP saves, alone or as one of several ranks.

`dcp_worker.py ACTION DIRECTORY RANK RANKS`; the last line of its output is JSON.
"""

# DCP does not list its public names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import perdure.plugins.dcp
from perdure.store import reader

# DCP warns that there is no process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
STEPS, EVERY, KILLED_AT = 8, 3, 5
# DCP's own storage warns that it will overwrite an empty directory.
warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    return model, torch.optim.Adam(model.parameters(), foreach=False)


def train(directory: str, own_storage: bool, kill: bool) -> None:
    """Eight steps with dropout, from the newest checkpoint on."""
    model, optimizer = training()
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()  # a state of Adam, into which a load can put another one
    start = 0
    state: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    newest = max((int(path.name) for path in Path(directory).glob("[0-9]*")), default=0)
    if own_storage and newest:
        dcp.load(state, storage_reader=dcp.FileSystemReader(f"{directory}/{newest}"))
        start = newest
    elif Path(directory, "checkpoints").is_dir():
        reader = perdure.plugins.dcp.Reader(directory)
        dcp.load(state, storage_reader=reader)
        assert reader.step is not None
        start = reader.step
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    for step in range(start + 1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * step).square().sum().backward()
        optimizer.step()
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            path = f"{directory}/{step}"
            writer = perdure.plugins.dcp.Writer(directory, step)
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path) if own_storage else writer)
        if kill and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    print(json.dumps({"start": start, "model": values}))


def sharded(mesh: Any, placement: Any, fill: bool) -> dict[str, Any]:
    rows = torch.arange(20.0).reshape(5, 4) if fill else torch.zeros(5, 4)
    return {
        "model": {
            "rows": distribute_tensor(rows, mesh, [placement]),
            "same": distribute_tensor(rows + 1 if fill else rows, mesh, [Replicate()]),
            # Of it the second rank has nothing.
            "one": distribute_tensor(torch.full((1,), 5.0 if fill else 0.0), mesh, [Shard(0)]),
        },
        "plain": torch.full((2,), 3 if fill else 0),
        "step": 4 if fill else 0,
    }


def as_rank(action: str, directory: str, rank: int, ranks: int) -> None:
    """Save a state of two ranks sharded by rows, or load it sharded by columns."""
    store = f"file://{directory}-{action}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    answer: dict[str, Any] = {}
    torch.manual_seed(rank)
    if action == "large":
        state = {"x": torch.zeros(3 * 2**20, dtype=torch.int32)}
        read: list[int] = []
        fault = reader.first_fault
        reader.first_fault = lambda one, *rest: read.append(one.nbytes) or fault(one, *rest)
        dcp.load(state, storage_reader=perdure.plugins.dcp.Reader(directory))
        answer["equal"] = torch.equal(state["x"], torch.arange(3 * 2**20, dtype=torch.int32))
        answer["read"] = sum(nbytes >= 2**20 for nbytes in read)
    elif action == "save":
        state = sharded(mesh, Shard(0), fill=True)
        dcp.save(state, storage_writer=perdure.plugins.dcp.Writer(directory, 4))
        dcp.save(state, storage_writer=perdure.plugins.dcp.Writer(directory, 5, max_to_keep=1))
        try:
            other = {**state, "plain": torch.full((2,), 9)}  # bits that would be written
            dcp.save(other, storage_writer=perdure.plugins.dcp.Writer(directory, 6 + rank))
        except CheckpointException as error:
            answer["steps"] = str(error)
    else:
        state = sharded(mesh, Shard(1), fill=False)
        dcp.load(state, storage_reader=perdure.plugins.dcp.Reader(directory))
        whole = sharded(mesh, Shard(1), fill=True)
        answer["equal"] = state["step"] == 4 and all(
            torch.equal(state["model"][name].full_tensor(), whole["model"][name].full_tensor())
            for name in ("rows", "same", "one")
        )
        answer["plain"] = state["plain"].tolist()
    answer["draw"] = torch.rand(1).item()
    dist.destroy_process_group()
    print(json.dumps(answer))


def main() -> None:
    action, directory, rank, ranks = sys.argv[1:]
    if action in ("save", "load", "large"):
        as_rank(action, directory, int(rank), int(ranks))
    else:
        train(directory, own_storage=action.startswith("own"), kill=action.endswith("killed"))


if __name__ == "__main__":
    main()
