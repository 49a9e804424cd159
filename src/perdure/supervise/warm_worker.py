"""`WarmWorkers`: processes that have imported their frameworks before they are needed.

Invariant: a warm process is never forked from a process with threads. It imports the named modules
and does nothing else, until it gets its arguments and variables once.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from perdure.errors import LaunchError
from perdure.runtime import heartbeats
from perdure.runtime.process_group import ATTEMPT
from perdure.supervise.worker_environment import DESCRIPTIONS

BECOME_WORKER = "from perdure.supervise.warm_worker import become_worker; become_worker()"


class WarmWorkers:
    """One warm process for each slot of a group; none without `modules`.

    `message` is called with the reason if imports failed. Raises LaunchError if `command` is not
    `python script.py ...` or `python -m module ...`.
    """

    def __init__(
        self, command: Sequence[str], modules: Sequence[str], message: Callable[[str], None] = print
    ) -> None:
        python = os.path.basename(command[0]).startswith("python")
        if modules and not (
            python
            and len(command) > 1
            and (command[1].endswith(".py") or (command[1] == "-m" and len(command) > 2))
        ):
            raise LaunchError(
                "warm workers need a command of the form python script.py or python -m module, found "
                f"{' '.join(command[:3])}"
            )
        self._command = list(command)
        self._modules = list(modules)
        self._message = message
        self._ready: dict[int, subprocess.Popen[bytes]] = {}
        self._environments: dict[int, dict[str, str]] = {}

    def prepare(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start a process for each slot that has none; `environments` are those of the workers."""
        for slot, environment in environments.items() if self._modules else ():
            if slot in self._ready and self._ready[slot].poll() is None:
                continue
            self.drop(slot)
            self._environments[slot] = _persistent(environment)
            self._ready[slot] = subprocess.Popen(
                [self._command[0], "-c", BECOME_WORKER, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environments[slot],
                start_new_session=True,
            )

    def take(self, slot: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """The process of `slot`, which now runs the program; None without a fitting one."""
        process = self._ready.pop(slot, None)
        if process is None:
            return None
        assert process.stdin is not None
        if process.poll():
            self._report_failure(slot, process)
        task = {"arguments": self._command[1:], "environment": dict(environment)}
        try:
            if process.poll() is None and self._environments[slot] == _persistent(environment):
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.close()
                return process
        except BrokenPipeError:
            pass
        self._end(process)
        return None

    def drop(self, slot: int) -> None:
        """End the process of `slot`."""
        if (process := self._ready.pop(slot, None)) is not None:
            self._end(process)

    def close(self) -> None:
        """End all processes."""
        for slot in list(self._ready):
            self.drop(slot)

    @property
    def pids(self) -> frozenset[int]:
        """IDs of the processes that wait."""
        return frozenset(process.pid for process in self._ready.values())

    def _report_failure(self, slot: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        lines = process.stdout.read().decode(errors="replace").strip().splitlines()
        self._message(
            f"the warm worker of place {slot} ended while it imported {', '.join(self._modules)}: "
            f"{lines[-1] if lines else f'status {process.returncode}'}"
        )

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _persistent(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that stay the same from one attempt to the next; without the heartbeat file."""
    changing = {*DESCRIPTIONS, ATTEMPT, heartbeats.VARIABLE}
    return {name: value for name, value in environment.items() if name not in changing}


def become_worker() -> None:
    """Import the modules of `sys.argv`, wait for the task (a line of JSON), and run the program."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the supervisor does not need it any more
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
