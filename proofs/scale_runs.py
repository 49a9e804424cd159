"""Real runs of 2, 4 and 8 processes under `perdure run`, beside what the model says of them.

A calibration run with one kill gives the constants of a number of workers: how long a step, a save, a
restart and the end take. Then another run has other kills, at seeded times, and the simulation is given
the same times. Workers are killed after so many seconds of training: when the group is killed while it
starts is not simulated here.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import scale_program
from scale_model import Outcome, Plan, lives, simulate

from perdure import load_checkpoint
from perdure.runtime.heartbeats import Beat
from perdure.supervise import Observer, RunHistory, RunOptions, Supervisor
from perdure.supervise.console import Console
from perdure.supervise.worker import Worker

PROGRAM = Path(__file__).with_name("scale_program.py")
STEP_S = 0.1
START_S = 5.0
SAVE_EVERY = 60
MEAN_LIFE_S = 7.0
BESIDE_SAVE_S = 0.5
SEED = 54
STEPS = 420  # so that the end, too, is a save
CALIBRATION_STEPS = 200  # so that the last attempt saves three times
CALIBRATION_LIVES = (3.0,)


class Watch(Observer):
    """Kills a random worker after given seconds of training, and times the saves of worker 0."""

    def __init__(self, given: Sequence[float], seed: int) -> None:
        self._left = list(given)
        self._chance = random.Random(seed)
        self._workers: dict[int, Worker] = {}
        self._life: float | None = None
        self._saving: tuple[int, float] | None = None
        self.killed_at: list[float] = []
        self.saves_s: list[float] = []

    def started(self, worker: Worker) -> None:
        self._workers[worker.index] = worker
        if worker.index == 0:
            self._life = self._left.pop(0) if self._left else None
            self._saving = None

    def beat(self, worker: Worker, beat: Beat) -> None:
        now = time.monotonic()
        if worker.index == 0:
            self._time_save(beat, now)
        if self._life is None or beat.first is None or now < beat.first - STEP_S + self._life:
            return
        self._workers[self._chance.randrange(len(self._workers))].send(signal.SIGKILL)
        self.killed_at.append(now)
        self._life = None

    def _time_save(self, beat: Beat, now: float) -> None:
        if self._saving and beat.saving != self._saving[0]:
            self.saves_s.append(now - self._saving[1])
            self._saving = None
        if self._saving is None and beat.saving is not None:
            self._saving = beat.saving, now


@dataclass(frozen=True)
class RealRun:
    """What was seen of one run."""

    summary: RunHistory
    killed_at: list[float]
    saves_s: list[float]
    requests: list[int]  # of one save each
    is_exact: bool


def run(work: Path, name: str, workers: int, steps: int, given: Sequence[float]) -> RealRun:
    """Run the program with `workers` workers, which live for the `given` seconds, one after another."""
    where, requests = work / name, work / f"{name}-requests"
    command = [sys.executable, str(PROGRAM), str(where), "--steps", str(steps)]
    command += ["--step-s", str(STEP_S), "--save-every", str(SAVE_EVERY)]
    command += ["--start-s", str(START_S), "--requests", str(requests)]
    options = RunOptions(
        workers=workers,
        max_restarts=1000,
        log_directory=work / f"{name}-logs",
        environment={"OMP_NUM_THREADS": "1"},
        poll=0.02,
    )
    watch = Watch(given, seed=workers)
    with open(work / f"{name}-said", "w") as said:
        console = Console(said, said)
        summary = Supervisor(command, options, observer=watch, console=console).run()
    if summary.status != 0:
        raise SystemExit(f"{name}: {summary.reason}\n{(work / f'{name}-said').read_text()[-4000:]}")
    return RealRun(
        summary, watch.killed_at, watch.saves_s, _differences(requests), _is_exact(where, steps)
    )


def _differences(path: Path) -> list[int]:
    """How many requests lie between two saves of one attempt, but for its first, which take more."""
    by_attempt: dict[str, list[int]] = {}
    for line in path.read_text().splitlines():
        attempt, count = line.split()
        by_attempt.setdefault(attempt, []).append(int(count))
    counts = by_attempt.values()
    return [after - before for count in counts for before, after in pairwise(count[1:])]


def _is_exact(where: Path, steps: int) -> bool:
    """Whether the run ended with the bits of an undisturbed loop."""
    expected = scale_program.initial()
    for _ in range(steps):
        expected = scale_program.advance(expected)
    found = load_checkpoint(where)
    return found["step"] == steps and found["weights"].tobytes() == expected["weights"].tobytes()


def calibrated(real: RealRun, steps: int) -> Plan:
    """The constants of a run of `steps` steps, measured in the calibration run `real`."""
    attempts = real.summary.attempts
    step_s = real.summary.step_seconds
    first, last = attempts[0], attempts[-1]
    assert step_s
    assert first.first_time
    assert last.last_time
    firsts = [attempt.first_time for attempt in attempts[1:] if attempt.first_time]
    assert len(firsts) == len(real.killed_at)
    recover = [after - killed for killed, after in zip(real.killed_at, firsts, strict=True)]
    return Plan(
        steps=steps,
        step_s=step_s,
        save_every=SAVE_EVERY,
        durable_s=median(real.saves_s),
        start_s=first.first_time - first.began - step_s,
        recover_s=fmean(recover) - step_s,
        end_s=last.noticed - last.last_time,
    )


def seeded_lives(workers: int) -> list[float]:
    """Exponential times of training between kills, enough for the whole run.

    Left out are those that end beside a save: whether it is durable by then, and with it whether all
    its steps are repeated, is decided by milliseconds, which are not the model's.
    """
    chance, every = random.Random(SEED + workers), SAVE_EVERY * STEP_S
    drawn = (chance.expovariate(1 / MEAN_LIFE_S) for _ in range(200))
    return [life for life in drawn if BESIDE_SAVE_S < life % every < every - BESIDE_SAVE_S]


@dataclass(frozen=True)
class Comparison:
    """A real run, the model's run, and the model's run if restarts and repeated steps were free."""

    workers: int
    plan: Plan
    real: RealRun
    model: Outcome
    requests: float

    @property
    def goodput_error(self) -> float:
        """Of the model, as a share of what was measured."""
        assert self.real.summary.goodput
        return self.model.goodput / self.real.summary.goodput - 1


def compare(work: Path, workers: int) -> Comparison:
    """Calibrate, run, and simulate."""
    calibration = run(work, f"calibration-{workers}", workers, CALIBRATION_STEPS, CALIBRATION_LIVES)
    plan, given = calibrated(calibration, STEPS), seeded_lives(workers)
    real = run(work, f"run-{workers}", workers, STEPS, given)
    requests = median(calibration.requests)
    return Comparison(workers, plan, real, simulate(plan, lives(given)), requests)
