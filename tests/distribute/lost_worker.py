"""One process of a group ends, while the other one waits for it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

import torch.distributed as dist

import perdure
from perdure.distribute import SimpleClusterResolver
from perdure.errors import WorkerLostError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--how", required=True)
    parser.add_argument("--victim", type=int, required=True)
    options = parser.parse_args()
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
        answer = {"error": type(error).__name__, "text": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")


main()
