"""A training of PyTorch whose bits do not depend on the number of processes, for proof_nodes.py.

python nodes_torch.py MARKS FAULT... -- RUN STEPS       (faults: tests/launch/faulty.py)
"""

from __future__ import annotations

import sys
from pathlib import Path

import faulty
import torch
from torch.nn.parallel import DistributedDataParallel

import perdure
from perdure.torch import LogicalReplicas

REPLICAS, SAVE_EVERY = 4, 5


def train(run: str, steps: int) -> None:
    torch.set_num_threads(1)
    processes = perdure.initialize_distributed("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    replicas = LogicalReplicas(ddp, REPLICAS)
    state = perdure.Checkpoint(model=ddp, optimizer=optimizer)
    # Every replica seeds for itself: nothing depends on the generators of a process.
    options = perdure.ManagerOptions(save_random_state=False)
    with perdure.CheckpointManager(
        run, save_interval_steps=SAVE_EVERY, processes=processes, options=options
    ) as manager:
        state, start = manager.restore_or_initialize(state)
        if processes.index == 0:
            print(f"{processes.count} processes, from step {start}", flush=True)
        for step in range(start, steps):
            optimizer.zero_grad()
            for replica in replicas:
                torch.manual_seed(REPLICAS * step + replica)
                ddp(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            manager.save(step + 1, state, force=step + 1 == steps)
            if manager.reached_preemption(step + 1):
                manager.save_and_exit(step + 1, state)


if __name__ == "__main__":
    cut = sys.argv.index("--")
    faulty.install(Path(sys.argv[1]), sys.argv[2:cut])
    train(sys.argv[cut + 1], int(sys.argv[cut + 2]))
