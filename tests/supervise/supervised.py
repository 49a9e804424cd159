"""A run of small programs without a framework, for the tests of the supervisor."""

from __future__ import annotations

import errno
import io
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.supervise import Observer, RunHistory, RunOptions, Supervisor
from perdure.supervise.console import Console
from perdure.supervise.orphan_reaper import marked
from perdure.supervise.worker import Worker

# A loop of 20 steps that goes on where the file of its worker says. `fault(step)` is each test's own.
LOOP = """
import json, os, signal, subprocess, sys
from pathlib import Path
from perdure import heartbeat
ATTEMPT, RANK = int(os.environ["PERDURE_ATTEMPT"]), os.environ["RANK"]
done = Path(f"step-{RANK}")
start = int(done.read_text()) if done.exists() else 0
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
def hold():
    signal.pause()
def await_observer():
    signal.sigwait({signal.SIGUSR1})
FAULT
heartbeat(start, "compile")
for step in range(start + 1, 21):
    fault(step)
    heartbeat(step)
    if step % 5 == 0:  # replaced whole: a signal may end the program in the middle of a write
        Path(f"{done}.new").write_text(str(step))
        os.replace(f"{done}.new", done)
heartbeat(20, "end")
"""
NOTHING = "def fault(step): pass"


class LoopObserver(Observer):
    """An observer that also acts whenever the supervisor has waited, because it is its clock.

    `out` and `err` are what the run has printed so far.
    """

    out: io.StringIO
    err: io.StringIO
    supervisor: Supervisor

    def __init__(self) -> None:
        self.workers_started: list[Worker] = []

    def started(self, worker: Worker) -> None:
        self.workers_started.append(worker)

    def clock(self) -> float:
        self.look()
        return time.monotonic()

    def look(self) -> None: ...


class Run:
    """What a run came to, and what it printed."""

    def __init__(self, code: str, observer: Observer | None = None, **options: Any) -> None:
        clock = observer.clock if isinstance(observer, LoopObserver) else time.monotonic
        self.out, self.err = io.StringIO(), io.StringIO()
        if isinstance(observer, LoopObserver):
            observer.out, observer.err = self.out, self.err
        chosen = RunOptions(**{"log_directory": Path("logs"), "poll": 0.01, **options})
        self.supervisor = Supervisor(
            [sys.executable, "-c", code],
            chosen,
            console=Console(self.out, self.err),
            observer=observer,
            clock=clock,
        )
        if isinstance(observer, LoopObserver):
            observer.supervisor = self.supervisor
        self.summary: RunHistory = self.supervisor.run()
        assert marked(self.supervisor._mark) == []

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in self.summary.attempts]


def loop(fault: str) -> str:
    return LOOP.replace("FAULT", fault)


def environment(worker: Worker) -> dict[str, str]:
    """The variables that a worker was started with."""
    # `exec` closes the pipe on which the parent waits before the kernel has set the new environment.
    while not (text := Path(f"/proc/{worker.pid}/environ").read_text()):
        assert worker.status is None, "it has ended"
    return {name: value for name, _, value in (part.partition("=") for part in text.split("\0"))}


def cli(*arguments: str, code: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perdure.cli", "run", *arguments, "--"]
    return subprocess.Popen(
        [*command, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


HOLDS = """
import os, signal, subprocess, sys
STOP
child = subprocess.Popen(["setsid", "sleep", "1000"])
print("pids", os.environ["PERDURE_HEARTBEAT_FILE"], os.getpid(), child.pid, flush=True)
while True:
    signal.pause()
"""


def pids(run: subprocess.Popen[str]) -> list[int]:
    """The worker of `HOLDS` and the worker's child."""
    return held(run)[1]


def held(run: subprocess.Popen[str]) -> tuple[Path, list[int]]:
    """Where the heartbeats of a run of `HOLDS` lie, and its worker and the worker's child."""
    assert run.stdout is not None
    *_, heartbeat, worker, child = run.stdout.readline().split()
    return Path(heartbeat).parent, [int(worker), int(child)]


def gone(pid: int, seconds: float = 20) -> bool:
    """Whether a process is gone within the time; waits for its end, and not for the clock."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([file], [], [], seconds)[0])
    finally:
        os.close(file)


class Full(io.StringIO):
    """A disk without room."""

    tries = 0

    def write(self, _: str) -> int:
        self.tries += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
