"""One process of a group ends while the other one waits for it."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from worker_program import answer, arguments

import perdure
from perdure.distribute import ClusterOptions, SimpleClusterResolver
from perdure.errors import WorkerLostError


def main() -> None:
    options = arguments(group=str, how=str, victim=int, wait="barrier")
    resolver = None
    if options.group == "joined":
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{options.coordinator}",
            rank=options.process,
            world_size=options.processes,
        )
    else:
        resolver = SimpleClusterResolver(options.coordinator, options.processes, options.process)
    # Much longer than the time limit of the test: nobody may wait for it.
    limits = ClusterOptions(leave_timeout=3600)
    processes = perdure.initialize_distributed("torch", resolver, limits)
    try:
        processes.barrier()
        if options.process == options.victim:
            if options.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if options.how == "exit":
                sys.exit(3)
            raise RuntimeError("the program failed")
        if options.wait == "barrier":
            processes.barrier()
        else:  # one of the program's own
            dist.all_reduce(torch.ones(1))
    except (WorkerLostError, RuntimeError) as error:
        if options.process == options.victim:
            raise
        answer({"error": type(error).__name__, "text": str(error)})


main()
