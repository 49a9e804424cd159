"""Launchers that restart a job: Ray Train after killed workers, submitit after a requeue.

The training of examples/cluster ends under them with the fingerprint of one undisturbed process.
A part of `make proof-drill`. Needs Ray and submitit (requirements/proof-drill.txt); one that is missing
is skipped with the reason and gives a row that is not met. Two minutes on two cores.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from perdure.store import Run
from report import Row, row

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "cluster"
FAULTY = ROOT / "tests" / "launch"
STEPS = 60
LIMIT_S = 300
LEAVE_S = 30

# Step, process, signal, receiver (tests/launch/faulty.py). Process 0 runs JAX's coordinator.
KILLS = ("25:1:SIGKILL:self", "45:0:SIGKILL:self")
NOTICES = ("21:0:SIGUSR2:launcher", "42:0:SIGUSR2:launcher")


def rows(work: Path) -> Iterator[Row]:
    """The rows, one by one; `work` is an empty directory."""
    train = [sys.executable, str(EXAMPLE / "train.py")]
    alone, other = work / "alone", work / "other"
    _run(work, [*train, str(alone), "--steps", str(STEPS)])
    _run(work, [*train, str(other), "--steps", str(STEPS), "--replicas", "4"])
    expected = _fingerprint(alone)
    # Negative control, without which the rows below would prove nothing.
    yield row("another recipe ends with another fingerprint", [_fingerprint(other) != expected])
    yield from _ray(work, expected)
    yield from _submitit(work, expected)


def _ray(work: Path, expected: str | None) -> Iterator[Row]:
    if find_spec("ray") is None:
        yield row("Ray Train: left out, Ray is not installed here (make proof-drill has it)", [])
        return
    # In a short path, because the length of a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        place, run = Path(name), work / "ray"
        for folder in ("joined", "marks"):
            (place / folder).mkdir()
        program = [sys.executable, str(Path(__file__).parent / "launch_ray.py")]
        mark = f"PERDURE_PROOF={uuid.uuid4()}"
        ended = _run(work, [*program, str(run), str(STEPS), name, *KILLS], mark, HOME=name)
        left = _left_behind(mark)
        groups = [file.read_text() for file in (place / "joined").iterdir()]
        fired = len(list((place / "marks").iterdir()))
    outcomes = [ended, _fingerprint(run) == expected]
    yield row("Ray Train, a worker killed, then the one with the coordinator: same end", outcomes)
    yield row("Ray Train: kills that fired", [fired > number for number in range(len(KILLS))])
    yield row(
        "Ray Train: workers of all attempts that found themselves in one group of two",
        joined(groups, len(KILLS) + 1),
    )
    yield row("Ray Train: no process is left behind", [not left])


def joined(groups: list[str], attempts: int) -> list[bool]:
    """For each worker of each attempt, whether it joined. A missing or an additional worker gives
    False."""
    complete = [f"{index} of 2" for index in range(2) for _ in range(attempts)]
    return [one == other for one, other in zip_longest(sorted(groups), complete)]


def _submitit(work: Path, expected: str | None) -> Iterator[Row]:
    if find_spec("submitit") is None:
        yield row("submitit: left out, it is not installed here (make proof-drill has it)", [])
        return
    (work / "marks").mkdir()
    faulty = [sys.executable, str(FAULTY / "faulty.py"), "marks", *NOTICES]
    submit = [sys.executable, str(EXAMPLE / "submit.py"), "--cluster", "local", "--workers", "2"]
    ended = _run(work, [*submit, "--", *faulty, "--", "submitted", "--steps", str(STEPS)])
    outcomes = [ended, _fingerprint(work / "submitted") == expected]
    yield row("submitit, two tasks, requeued twice: same end", outcomes)
    log = "".join(file.read_text() for file in (work / "submitit").glob("*_0_log.out"))
    requeued = log.count("Requeued job")
    yield row("submitit: requeues that happened", [requeued > n for n in range(len(NOTICES))])


def _run(work: Path, command: list[str], mark: str = "", **environment: str) -> bool:
    """Whether `command` exited with 0. Its output is kept in `work`, and printed if it failed."""
    path = os.pathsep.join([str(EXAMPLE), str(FAULTY), os.environ.get("PYTHONPATH", "")])
    name, _, value = mark.partition("=")
    environ = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
    if name:
        environ[name] = value
    log = work / f"{Path(command[1]).stem}.log"
    with log.open("a") as file:
        done = subprocess.run(
            command,
            cwd=work,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode != 0:
        print(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-4000:]}")
    return done.returncode == 0


def _fingerprint(where: Path) -> str | None:
    """The fingerprint of the last step; None if the run did not reach it."""
    run = Run(where) if where.exists() else None
    return run.manifest(STEPS).fingerprint if run and STEPS in run.steps() else None


def _left_behind(mark: str) -> list[int]:
    """Processes that still have `mark` in their environment after `LEAVE_S`; they are killed."""
    until = time.monotonic() + LEAVE_S
    while (processes := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    return processes


def _marked(mark: str) -> list[int]:
    processes = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                processes.append(int(place.name))
        except OSError:  # the process has just ended, or belongs to another user
            continue
    return processes
