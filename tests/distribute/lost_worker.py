"""One process of a group ends while the other one waits for it."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from worker_program import answer, arguments

import perdure
from perdure.distribute import SimpleClusterResolver
from perdure.errors import WorkerLostError


def main() -> None:
    options = arguments(group=str, how=str, victim=int)
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
    processes = perdure.initialize_distributed("torch", resolver)
    try:
        processes.barrier()
        if options.process == options.victim:
            if options.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the program failed")
        processes.barrier()
    except WorkerLostError as error:
        answer({"error": type(error).__name__, "text": str(error)})


main()
