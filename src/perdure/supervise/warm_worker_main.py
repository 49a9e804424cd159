"""The program of a warm worker: imports modules, waits for its task, and becomes the worker.

    python -m perdure.supervise.warm_worker_main MODULE ...

The task is one line of JSON on standard input: the arguments after `python`, and the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path


def _main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the supervisor does not need it any more
    from perdure import heartbeats  # so that the program finds it imported

    task = json.loads(line)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(task["environment"])

    heartbeats.open_file()
    first, *rest = task["arguments"]
    if first == "-m":
        # As `python -m` does: the working directory comes first.
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).absolute().parent)
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _main()
