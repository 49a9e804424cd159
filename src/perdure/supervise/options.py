"""The options and the command of a run, checked before anything is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from perdure.errors import CommandError, LaunchError
from perdure.runtime.system import require_linux, require_processes
from perdure.supervise.worker_environment import Nodes


@dataclass(frozen=True)
class Limits:
    """Seconds without a heartbeat, in each phase, after which a worker counts as hung.

    None, the default, follows measured silences (`perdure.supervise.silence`); `math.inf` removes the
    limit. The first limit begins with the first heartbeat, which the import of perdure gives in the
    phase `start`. A program that never imports perdure never counts as hung. `stopped` is the limit for
    a process that SIGSTOP has stopped, in any phase.

    Raises:
        LaunchError: If a limit is not above 0.
    """

    start: float | None = None
    restore: float | None = None
    compile: float | None = None
    step: float | None = None
    save: float | None = None
    evaluate: float | None = None
    end: float | None = None
    stopped: float = 10

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise LaunchError(
                    f"limit {limit.name}: expected more than 0 seconds, found {value}"
                )


@dataclass(frozen=True)
class RunOptions:
    """How a run is started, watched and restarted.

    Attributes:
        workers: Processes to start on this machine.
        nodes: The machines that run the same command together; None for this one alone. It excludes
            `elastic`.
        devices_per_worker: Devices of each worker; None leaves them to the framework.
        max_restarts: Failures after which the run is restarted; an exit with 75 is no failure.
        elastic: (fewest, most) workers. The run continues without a worker that fails again and again,
            and returns to all of them after `return_s`; `most` equals `workers`.
        log_directory: Is created, for the logs and the record of the run; by default
            perdure-logs/DATE-TIME-PID, and perdure-logs for the record.
        timestamps: Begin each line of the logs with the time at which it was read.
        limits: When a silent worker counts as hung.
        grace: Seconds after which a worker that was asked to exit is killed.
        return_s: Seconds before a smaller group tries to grow; doubled after each try.
        environment: Variables for every worker.
        compilation_cache: Where JAX keeps compiled programs; None leaves that to JAX.
        warm: Modules. While workers train, a warm process beside each has imported them already, and
            takes its place after a failure.
        poll: Seconds between two reads of the heartbeats.

    Raises:
        LaunchError: If a value is out of range.
    """

    workers: int = 1
    devices_per_worker: int | None = None
    max_restarts: int = 100
    elastic: tuple[int, int] | None = None
    log_directory: Path | None = None
    timestamps: bool = False
    limits: Limits = field(default_factory=Limits)
    grace: float = 60
    return_s: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    compilation_cache: Path | None = None
    warm: tuple[str, ...] = ()
    poll: float = 0.1
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        at_least = {"workers": 1, "devices_per_worker": 1, "max_restarts": 0, "grace": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise LaunchError(f"{name}: expected at least {least}, found {value}")
        if self.warm:
            require_linux(
                "--warm",
                "because /proc tells spare processes from those that a worker has left behind",
                "leave --warm out, and a restart takes as long as the imports",
            )
        cache = self.compilation_cache
        if cache is not None and cache.exists() and not cache.is_dir():
            raise LaunchError(f"{cache}: expected a directory for compiled programs, found a file")
        if self.elastic is not None and self.nodes is not None:
            raise LaunchError("elastic: the number of workers cannot change on several machines")
        if self.elastic is not None:
            fewest, most = self.elastic
            if not 1 <= fewest <= most == self.workers:
                raise LaunchError(
                    f"elastic: expected fewest:most with 1 <= fewest <= most, and as many workers as "
                    f"most, found {fewest}:{most} and {self.workers} workers"
                )


def checked_command(command: Sequence[str], usage: str = "perdure run --") -> list[str]:
    """The command; raises `CommandError` if it cannot be started. `usage` is what stands before it."""
    require_processes(usage)
    if not command:
        raise CommandError(f"expected a command after --, for instance: {usage} python train.py")
    path = shutil.which(command[0])
    if path is None:
        raise CommandError(
            f"{command[0]}: no such command, or not executable. Expected a program and its arguments, "
            f"for instance: {usage} python train.py"
        )
    _check_interpreter(path, usage)
    first = os.path.basename(command[0])
    script = command[1] if first.startswith("python") and len(command) > 1 else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise CommandError(f"{script}: no such file, in {Path.cwd()}")
    return list(command)


def _check_interpreter(path: str, usage: str) -> None:
    """Raises `CommandError` if the first line of a script names a program that is not there."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:  # a program may be executable and not readable
        return
    words = line[2:].split()
    if not line.startswith(b"#!") or not words:
        return
    interpreter = os.fsdecode(words[0])
    if not os.access(interpreter, os.X_OK):
        raise CommandError(
            f"{path}: its first line names the interpreter {interpreter}, which is no program here. "
            f"Correct that line, or name the interpreter: {usage} python {path}"
        )
