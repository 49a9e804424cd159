"""Forks worker programs from one process that has imported a framework, which takes seconds.

Run as a program with the names of the modules to import. Each line of its standard input is a list of
workers; it starts them all, waits for all, and answers with a line of their exit statuses. A worker is
what `python -W error PROGRAM ARGUMENTS` would be, but for the hashes of strings: they are those of the
server, and so the same in all workers.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSED_BY_KERAS = ("tensorflow", "sklearn", "matplotlib")
"""Keras imports them if it can, for parts that no program uses; that takes longer than most do."""


def configure_jax(environment: Mapping[str, str]) -> None:
    """Set the options that these variables name, which JAX reads only while it is imported."""
    config = sys.modules["jax"].config
    for name, text in environment.items():
        if (option := name.lower()) in config.values:
            kind = type(config.values[option])
            config.update(option, kind(text) if kind in (int, float) else text)


def become(worker: dict[str, Any]) -> None:
    """Run the program of a forked worker in this process."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(worker["environment"])
    if "jax" in sys.modules:
        configure_jax({name: os.environ[name] for name in os.environ if name not in before})
    for number, (path, flags) in enumerate(
        (
            (os.devnull, os.O_RDONLY),
            (worker["out"], os.O_WRONLY | os.O_CREAT),
            (worker["err"], os.O_WRONLY | os.O_CREAT),
        )
    ):
        os.dup2(os.open(path, flags), number)
    program = Path(worker["program"])
    sys.argv = [str(program), *worker["arguments"]]
    sys.path[0] = str(program.parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(program)
    exec(compile(program.read_text(), program, "exec", dont_inherit=True), vars(main))


def main() -> None:
    for name in UNUSED_BY_KERAS:
        sys.modules[name] = None  # type: ignore[assignment]
    gc.disable()  # what is imported stays: to look for garbage in it takes a tenth of the time or more
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for name in UNUSED_BY_KERAS[1:]:  # a program may import them itself
        del sys.modules[name]
    gc.enable()
    gc.freeze()
    # The threads of NumPy's library for linear algebra are what Python warns of; it survives a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    for line in sys.stdin:
        pids = []
        for worker in json.loads(line):
            pids.append(os.fork())
            if pids[-1] == 0:
                become(worker)
                return
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
