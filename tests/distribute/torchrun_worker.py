"""A script for torchrun: DDP or FSDP2 with a manager. With `--how`, something happens in step 20."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_program import arguments

import perdure
from perdure.distribute import ClusterOptions

STEPS, VICTIM_AT = 30, 20


def end_torchrun() -> None:
    """Send SIGTERM until torchrun is gone; a single one it passes on, and waits."""
    torchrun = os.getppid()
    with suppress(ProcessLookupError):  # it may end between the two calls
        while os.getppid() == torchrun:
            os.kill(torchrun, signal.SIGTERM)


def main() -> None:
    options = arguments(directory=str, how="", group="made", wrapper="ddp")
    alive = open(f"{options.directory}.alive", "w")  # noqa: SIM115 (locked until this process ends)
    fcntl.flock(alive, fcntl.LOCK_SH)
    if options.group == "joined":
        dist.init_process_group("gloo")
    limits = ClusterOptions(leave_timeout=3600)  # nobody may wait for it
    processes = perdure.initialize_distributed("torch", options=limits)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as torchrun sets it, in a process without torchrun too
    net = torch.nn.Linear(4, 4)
    if options.wrapper == "ddp":
        model = DistributedDataParallel(net)
    else:
        model: Any = fully_shard(net, mesh=init_device_mesh("cpu", (processes.count,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = perdure.Checkpoint(net=net, optimizer=optimizer)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    with perdure.CheckpointManager(
        options.directory, processes=processes, save_interval_steps=5
    ) as manager:
        state, start = manager.restore_or_initialize(state)
        for step in range(start, STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step))).square().mean().backward()
            optimizer.step()
            manager.save(step + 1, state, force=step + 1 == STEPS)
            if step == VICTIM_AT and processes.is_chief and options.how and first:
                if options.how == "raise":
                    raise ValueError("the program failed")
                if options.how == "end torchrun":
                    end_torchrun()
                os.kill(os.getppid() if options.how == "torchrun" else os.getpid(), signal.SIGTERM)
            if options.how != "raise" and manager.reached_preemption(step + 1):
                manager.save_and_exit(step + 1, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
