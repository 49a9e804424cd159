"""How long a job stands still when a worker is killed, and what a supervisor costs.

    make bench-recovery      one table, and the same as JSON in build/bench-recovery.json

Every subject runs the demo's network (`recovery_job.py`) as one process or two, saves every 10 steps,
and loses a worker to SIGKILL some steps behind its start, over and over. Counted is the time from the
kill to the end of the first new step; the programs themselves write down the times. The first start is
not counted, so JAX's compilation cache is warm. torchrun and Ray Train run the same network in plain
PyTorch, and so does `perdure run` in one row, which compares the supervisors alone; the other rows of
perdure import it, too, and restore a verified checkpoint. Ray Train is measured with one process only.
A peer that is not installed, or does not come back, has a row without a figure that says so.

Goodput: a kill every 30 s on average for `--minutes`, saves at `auto`. Twenty minutes on two cores, ten
of them for the goodput.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from table import Row, compared, finish, row

from perdure.train.interval import optimum_interval

JOB = str(Path(__file__).parent / "recovery_job.py")
STEPS_BEFORE_KILL = 40  # a spare has time to import
LONGEST_S = 120.0
RAY_KILLS = 3
# torchrun's agent keeps one store for all attempts, where gloo finds the addresses of workers that are
# dead: with two processes some restarts fail and are tried again, and in some both workers then wait
# for good (github.com/pytorch/pytorch/issues/135712). So each attempt gets a store of its own.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FAILURES_S = 30.0


class Step(NamedTuple):
    """One line of a worker: when, who, which step."""

    time: float
    pid: int
    rank: int
    number: int


class Tail:
    """The steps that a job has done so far, read as they come."""

    def __init__(self, where: Path) -> None:
        self._path = where / "progress"
        self._at = 0
        self.steps: list[Step] = []

    def read(self) -> list[Step]:
        """The new ones."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        fresh = [
            Step(float(t), int(p), int(r), int(n))
            for t, p, r, n in (line.split() for line in whole.decode().splitlines())
        ]
        self.steps += fresh
        return fresh

    def wait(self, wanted: Callable[[Step], bool], job: subprocess.Popen[Any]) -> Step:
        """The first new step that is `wanted`."""
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until:
            for step in self.read():
                if wanted(step):
                    return step
            if job.poll() is not None:
                raise SystemExit(f"the job ended with {job.returncode}: {job.args}")
            time.sleep(0.005)
        raise TimeoutError(f"no new step within {LONGEST_S:g} s")


def commands(where: Path, workers: int, steps: int) -> dict[str, list[str]]:
    """How each subject starts the job."""
    python = sys.executable
    run = [python, "-m", "perdure.cli", "run", "--workers", str(workers)]
    run += ["--log-dir", str(where / "logs"), "--max-restarts", "1000"]
    run += ["--compilation-cache", str(where / "cache"), "--", python, JOB]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(workers), "--max-restarts", "1000", JOB]
    tail = [str(where), str(steps)]
    at = run.index("--")
    jax = [*run[:at], "--warm", "perdure.demo.train_jax", *run[at:]]
    torch = [*run[:at], "--warm", "perdure.demo.train_torch", *run[at:]]
    return {
        "perdure run, JAX": [*run, "jax", *tail],
        "perdure run --warm, JAX": [*jax, "jax", *tail],
        "perdure run, PyTorch": [*run, "torch", *tail],
        "perdure run --warm, PyTorch": [*torch, "torch", *tail],
        "perdure run, plain PyTorch": [*run, "plain", *tail],
        "torchrun, PyTorch": [*torchrun, "plain", *tail],
        "Ray Train, PyTorch": [python, JOB, "ray", *tail],
    }


@contextmanager
def started(command: Sequence[str], where: Path, **environment: str) -> Iterator[Any]:
    """The job, in a session of its own, ended with all of it."""
    with open(where / "output", "ab") as output:
        job = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment},
        )
        try:
            yield job
        finally:
            # SIGTERM first: Ray's own processes are in sessions of their own.
            job.terminate()
            with suppress(subprocess.TimeoutExpired):
                job.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def recoveries(name: str, workers: int, kills: int) -> tuple[list[float], float]:
    """Seconds from each kill to the first new step, and the median time of a step."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as path:
        where, found = Path(path), []
        tail = Tail(where)
        own = OWN_STORE if name.startswith("torchrun") else {}
        with started(commands(where, workers, 10**6)[name], where, **own) as job:
            victim = workers - 1
            dead, killed = 0, math.nan
            for number in range(kills + 1):
                first = tail.wait(partial(is_new, victim, dead), job)
                if number:
                    found.append(first.time - killed)
                tail.wait(partial(is_far, first), job)
                dead, killed = first.pid, time.monotonic()
                os.kill(dead, signal.SIGKILL)
        return found, step_seconds(tail.steps)


def is_new(rank: int, dead: int, step: Step) -> bool:
    """A step of the worker in that place that is not the one which was killed."""
    return step.rank == rank and step.pid != dead


def is_far(first: Step, step: Step) -> bool:
    """Some steps behind the first one of the same life."""
    return step.pid == first.pid and step.number >= first.number + STEPS_BEFORE_KILL


def step_seconds(steps: Sequence[Step]) -> float:
    """The median time between two steps of one process."""
    last: dict[int, Step] = {}
    gaps = []
    for step in steps:
        before = last.get(step.pid)
        if before is not None:
            gaps.append(step.time - before.time)
        last[step.pid] = step
    return statistics.median(gaps)


def goodput(minutes: float, seed: int) -> Iterator[Row]:
    """Useful step time of the whole, with kills at exponential distances."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as path:
        where = Path(path)
        command = commands(where, 1, 10**6)["perdure run, JAX"]
        command[command.index("jax")] = "trainer"
        rare = {"BENCH_FAILURES_S": "1e9"}
        with started(command, where, **rare) as job:
            tail = Tail(where)
            tail.wait(lambda step: step.number >= 150, job)
        each = step_seconds(tail.steps[50:])
        shutil.rmtree(where / "run")
        (where / "progress").unlink()
        (where / "output").unlink()
        tail, kills, recovered = Tail(where), 0, []
        with started(command, where, BENCH_FAILURES_S=str(FAILURES_S)) as job:
            begin = time.monotonic()
            end = begin + 60 * minutes
            current: Step | None = None
            due = begin + chance.expovariate(1 / FAILURES_S)
            killed = None
            while time.monotonic() < end:
                for step in tail.read():
                    if killed is not None and step.pid != (current.pid if current else 0):
                        recovered.append(step.time - killed)
                        killed = None
                    current = step
                # Between a kill and the first step behind it there is nobody whose number is known.
                if time.monotonic() >= due:
                    due = time.monotonic() + chance.expovariate(1 / FAILURES_S)
                    if current is not None and killed is None:
                        killed = time.monotonic()
                        os.kill(current.pid, signal.SIGKILL)
                        kills += 1
                time.sleep(0.005)
            tail.read()
            wall = time.monotonic() - begin
        reached = max(step.number for step in tail.steps)
        done = len({step.number for step in tail.steps if step.number <= reached})
        value = done * each / wall
        stall = save_seconds(tail.steps, each)
        restart = statistics.mean(recovered) if recovered else 0.0
        distance = wall / max(1, kills)
        tau = optimum_interval(stall, distance)
        # A life of mean length M begins with a restart R, saves cost d in each tau, and a kill finds
        # half an interval unsaved.
        best = (1 - restart / distance) * (1 - stall / (tau + stall)) - tau / 2 / distance
        text = f"goodput, {kills} kills in {wall / 60:.1f} min, saves at auto"
        costs = f"restart {restart:.2f} s, save {1e3 * stall:.0f} ms"
        mine = compared(row(text, value, ""), f"theoretical best ({costs})", best)
        yield {**mine, "reach": ">= 0.85", "met": value >= 0.85}


def save_seconds(steps: Sequence[Step], each: float) -> float:
    """What a save takes from the loop: by how much the slow steps are longer than the others."""
    gaps = []
    for before, after in pairwise(steps):
        if before.pid == after.pid:
            gaps.append(after.time - before.time - each)
    over = [gap for gap in gaps if gap > 0.25 * each]
    return statistics.median(over) if over else 0.001


def cost(seconds: float) -> Iterator[Row]:
    """CPU time and memory of the supervisor and its orphan reaper, beside two workers that make 50
    steps a second."""
    code = (
        "import time, perdure\nperdure.heartbeat(0, 'compile')\n"
        "for n in range(10**6):\n    time.sleep(0.02)\n    perdure.heartbeat(n + 1)"
    )
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as path:
        where = Path(path)
        run = [sys.executable, "-m", "perdure.cli", "run", "--workers", "2"]
        run += ["--log-dir", path, "--", sys.executable, "-c", code]
        with started(run, where) as job:
            time.sleep(2)
            own = [job.pid, *reapers(job.pid)]
            before, start = sum(map(cpu_seconds, own)), time.monotonic()
            time.sleep(seconds)
            share = (sum(map(cpu_seconds, own)) - before) / (time.monotonic() - start)
            memory = sum(map(memory_mb, own))
    text = f"supervisor and orphan reaper, CPU over {seconds:g} s"
    yield compared(row(text, 100 * share, "%"), "one core", 1.0, most=1.0)
    yield compared(
        row("supervisor and orphan reaper, resident memory", memory, "MB"), "", 50, most=1.0
    )


def reapers(pid: int) -> list[int]:
    """The children of the supervisor that are its own."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"orphan_reaper" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(int(child))
    assert found
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def left_out(name: str, workers: int) -> str:
    """Why a peer is not measured; empty where it is."""
    for peer, module in (("Ray", "ray"), ("torchrun", "torch")):
        if name.startswith(peer) and importlib.util.find_spec(module) is None:
            return f"left out: {module} is not installed here"
    if name.startswith("Ray") and workers > 1:
        return "left out: Ray Train is measured with one process only, its job is written for that"
    return ""


def rows(kills: int, minutes: float, parts: Sequence[str]) -> Iterator[Row]:
    """One table."""
    if "cost" in parts:
        yield from cost(20)
    if "recovery" in parts:
        for workers, reach in ((1, 3.0), (2, 6.0)):
            times: dict[str, float] = {}
            processes = f"{workers} process{'es' if workers > 1 else ''}"
            for name in commands(Path(), workers, 1):
                text = f"SIGKILL to the first new step, {processes}: {name}"
                if reason := left_out(name, workers):
                    yield row(text, None, "s", against=reason)
                    continue
                try:
                    found, step = recoveries(
                        name, workers, RAY_KILLS if name.startswith("Ray") else kills
                    )
                except (TimeoutError, SystemExit) as error:
                    if name.startswith("perdure"):
                        raise
                    yield row(text, None, "s", against=f"did not come back: {error}")
                    continue
                times[name] = statistics.median(found)
                spread = f"{min(found):.2f} .. {max(found):.2f}, {len(found)} kills"
                mine = row(text, times[name], "s", spread)
                if name.startswith("perdure"):
                    mine = compared(mine, f"a step takes {1e3 * step:.0f} ms", reach, most=1.0)
                yield mine
            for peer in (name for name in times if not name.startswith("perdure")):
                for name in (name for name in times if name.startswith("perdure")):
                    text = f"SIGKILL to the first new step, {processes}: {name}"
                    mine = compared(row(text, times[name], "s"), peer, times[peer])
                    yield {**mine, "reach": "< 1x", "met": times[name] < times[peer]}
    if "goodput" in parts and minutes > 0:
        yield from goodput(minutes, seed=6)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-recovery.json"))
    parser.add_argument("--kills", type=int, default=5, help="for each subject")
    parser.add_argument("--minutes", type=float, default=10, help="of the goodput; 0 for none")
    parser.add_argument("--parts", nargs="+", default=["cost", "recovery", "goodput"])
    given = parser.parse_args()
    return finish(rows(given.kills, given.minutes, given.parts), given.out)


if __name__ == "__main__":
    sys.exit(main())
