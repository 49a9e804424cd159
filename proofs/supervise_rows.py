"""Lines 3 and 4 of the proof of the drill: what `perdure run` brings back comes back with its bits.

`proof_drill` asks here. The program is the demo's, unchanged: a convolutional network on real digits,
V = 4. Four minutes on two cores with 20 kills.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from perdure.runtime.heartbeats import PHASES, Beat
from perdure.store import Run
from perdure.supervise import AttemptRecord, Limits, Observer, RunHistory, RunOptions, Supervisor
from perdure.supervise.console import Console
from perdure.supervise.worker import Worker
from report import Row, row

# Of this proof alone: what is left is counted without the mark by which `perdure run` finds it.
TOKEN = "PERDURE_PROOF_TOKEN"
STEPS = 300
STOPPED_S = 3.0


def start(
    where: Path,
    workers: int = 1,
    observer: Observer | None = None,
    cache: Path | None = None,
    steps: int = STEPS,
    devices: int = 1,
    warm: tuple[str, ...] = (),
    detached: bool = False,
) -> RunHistory:
    """The demo's program under the supervisor; `detached`: each worker starts a child beside it that
    has a session of its own and never ends by itself."""
    command = [sys.executable, "-m", "perdure.demo.train_jax"]
    if detached:
        command = ["sh", "-c", 'setsid sleep 100000 & exec "$@"', "sh", *command]
    command += ["--run", str(where)]
    command += ["--steps", str(steps), "--devices", str(devices)]
    logs = Path(f"{where}-logs")
    options = RunOptions(
        workers=workers,
        devices_per_worker=devices,
        max_restarts=1000,
        log_directory=logs,
        limits=Limits(stopped=STOPPED_S),
        environment={"JAX_PLATFORMS": "cpu", TOKEN: where.name},
        compilation_cache=cache,
        warm=warm,
        poll=0.02,
    )
    with open(f"{where}-lines", "a") as out, open(f"{where}-said", "a") as err:
        return Supervisor(command, options, observer=observer, console=Console(out, err)).run()


def alive(token: str) -> list[str]:
    """The programs of the processes that were started with `token` and still run."""
    wanted, found = f"{TOKEN}={token}".encode(), []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError):  # gone meanwhile, or another user's
                if wanted in (each / "environ").read_bytes().split(b"\0"):
                    found.append((each / "comm").read_text().strip())
    return found


def fingerprint(where: Path, step: int = STEPS) -> str:
    return Run(where).manifest(step).fingerprint


class Killer(Observer):
    """SIGKILL to a random worker, once in each attempt: in a phase of its start, or some steps on."""

    def __init__(self, kills: int, workers: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._workers = workers
        self._left = kills
        self._plan: tuple[int, str, int] | None = None
        self.fired: list[tuple[int, int, str]] = []  # attempt, worker, phase

    def started(self, worker: Worker) -> None:
        if worker.index == 0 and self._left:
            # Every fourth meets the imports, the restore or the compiler.
            early = len(self.fired) % 4 == 3
            phase = self._chance.choice(["start", "restore", "compile"]) if early else "step"
            self._plan = (self._chance.randrange(self._workers), phase, self._chance.randint(2, 18))

    def beat(self, worker: Worker, beat: Beat) -> None:
        if self._plan is None or worker.index != self._plan[0]:
            return
        victim, phase, steps = self._plan
        done = (beat.step or 0) - (beat.start or 0)
        # A phase may pass between two looks; the next one will do.
        if (phase == "step" and done >= steps) or (
            phase != "step" and PHASES.index(beat.phase) >= PHASES.index(phase)
        ):
            self.fired.append((worker.attempt, victim, beat.phase))
            worker.send(signal.SIGKILL)
            self._plan = None
            self._left -= 1


class Counting(Killer):
    """Also counts the detached children: at each kill, and once the attempt is over."""

    def __init__(self, kills: int, workers: int, seed: int, token: str) -> None:
        super().__init__(kills, workers, seed)
        self._token = token
        self.during = 0
        self.after: list[int] = []

    def beat(self, worker: Worker, beat: Beat) -> None:
        fired = len(self.fired)
        seen = alive(self._token).count("sleep") if beat.phase == "step" and self._plan else 0
        super().beat(worker, beat)
        if len(self.fired) > fired:
            self.during = max(self.during, seen)

    def ended(self, attempt: AttemptRecord) -> AttemptRecord:
        self.after.append(len(alive(self._token)))
        return attempt


class Spared(Killer):
    """Kills at steps alone, so that a spare is there, and counts the workers that were one."""

    def __init__(self, kills: int, workers: int, seed: int) -> None:
        super().__init__(kills, workers, seed)
        self.taken = 0

    def started(self, worker: Worker) -> None:
        super().started(worker)
        if self._plan is not None:
            self._plan = (self._plan[0], "step", 40)
        self.taken += b"become_worker" in Path(f"/proc/{worker.pid}/cmdline").read_bytes()


class Stopper(Observer):
    """SIGSTOP to one worker of the first attempt behind some steps."""

    def __init__(self) -> None:
        self.fired: list[float] = []

    def beat(self, worker: Worker, beat: Beat) -> None:
        if not self.fired and worker.index == 1 and beat.first is not None:
            self.fired.append(time.monotonic())
            worker.send(signal.SIGSTOP)


def killed(work: Path, kills: int, expected: str) -> Iterator[Row]:
    """Line 3."""
    killer = Counting(kills, 2, 3, "killed")
    summary = start(work / "killed", 2, killer, work / "cache", detached=True)
    attempts = [each for each in summary.attempts if each.kind != "done"]
    phases: dict[str, int] = {}
    for _, _, phase in killer.fired:
        phases[phase] = phases.get(phase, 0) + 1
    print(f"       killed in phase: {phases}; {_told(summary.attempts)}")
    yield row(
        "kills of a random worker of two: each is one restart in the summary, by its cause",
        [
            found.kind == "killed" and found.cause == f"worker {worker}: SIGKILL"
            and found.number == attempt
            for found, (attempt, worker, _) in zip(attempts, killer.fired, strict=True)
        ],
    )  # fmt: skip
    yield row(
        f"that run ends with the fingerprint of the undisturbed single process ({kills} kills)",
        [len(killer.fired) == kills and fingerprint(work / "killed") == expected],
    )
    yield row(
        "no process of it is left behind, nor a detached child of its workers "
        f"({killer.during} seen alive at a kill), behind every attempt",
        [killer.during == 2 and count == 0 for count in killer.after]
        + [alive("killed") == [] and summary.left_behind == 0 and summary.status == 0],
    )


def stopped(work: Path, expected: str) -> Iterator[Row]:
    """Line 4."""
    stopper = Stopper()
    summary = start(work / "stopped", 2, stopper, work / "cache")
    first = summary.attempts[0]
    noticed = first.noticed - stopper.fired[0] if stopper.fired else float("inf")
    print(f"       noticed after {noticed:.2f} s, limit {STOPPED_S:g} s: {first.cause}")
    yield row(
        "SIGSTOP of a worker is noticed within its limit (and a second of looking), and recovered",
        [
            first.kind == "stopped"
            and STOPPED_S <= noticed <= STOPPED_S + 1
            and summary.status == 0
            and fingerprint(work / "stopped") == expected
        ],
    )


def warm(work: Path, kills: int, expected: str) -> Iterator[Row]:
    """Spare workers that have imported the program beforehand."""
    spared = Spared(kills, 2, seed=5)
    modules = ("perdure.demo.train_jax",)
    summary = start(work / "warm", 2, spared, work / "cache", warm=modules)
    yield row(
        f"{kills} kills with warm workers ({spared.taken} spares became one): the same fingerprint",
        [
            spared.taken == 2 * kills
            and summary.restarts == kills
            and fingerprint(work / "warm") == expected
        ],
    )


def cached(work: Path) -> Iterator[Row]:
    """The compilation cache, off, cold and warm, on several topologies."""
    steps = 20
    outcomes, warm = [], []
    for workers, devices in ((1, 1), (1, 2), (2, 1)):
        name, cache = f"cache-{workers}-{devices}", work / f"cache-{workers}-{devices}-entries"
        found = []
        for how in ("off", "cold", "warm"):
            before = _entries(cache)
            start(
                work / f"{name}-{how}",
                workers,
                None,
                None if how == "off" else cache,
                steps,
                devices,
            )
            found.append(fingerprint(work / f"{name}-{how}", steps))
            if how == "warm":
                warm.append(bool(before) and _entries(cache) == before)
            shutil.rmtree(work / f"{name}-{how}")
        outcomes.append(found)
    same = {each for found in outcomes for each in found}
    yield row(
        "fingerprints without, with a cold and with a warm compilation cache are equal "
        "(1 device, 2 devices, 2 workers)",
        [each in same and len(same) == 1 for found in outcomes for each in found],
    )
    yield row("with a warm cache nothing was compiled anew", warm)


def rows(kills: int = 20) -> Iterator[Row]:
    """The rows, one by one; `kills` of a worker in line 3."""
    with tempfile.TemporaryDirectory(prefix="perdure-proof-") as path:
        work = Path(path)
        start(work / "whole")
        expected = fingerprint(work / "whole")
        yield from killed(work, kills, expected)
        yield from stopped(work, expected)
        yield from warm(work, min(kills, 3), expected)
        yield from cached(work)


def _entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*-cache")) if cache.exists() else []


def _told(attempts: Sequence[AttemptRecord]) -> str:
    return f"{len(attempts)} attempts, {sum(each.stepped for each in attempts)} got to a step"
