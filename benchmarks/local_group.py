"""A program of this folder as a group of processes on this machine, with torchrun's variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from perdure.runtime.ports import free_ports

HERE = Path(__file__).parent


def reports_of(program: str, processes: int, *arguments: object) -> list[dict[str, Any]]:
    """The JSON of the last line that each process prints.

    Raises:
        RuntimeError: A process fails; the message has the end of what each wrote.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "WORLD_SIZE": str(processes)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    environment |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}  # as torchrun does
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    started = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        errors = "\n".join(error[-3000:] for _, error in ended)
        raise RuntimeError(f"{program} {arguments}, {processes} processes failed:\n{errors}")
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]
