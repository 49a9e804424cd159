"""Running a program once under the drill: by the supervisor of `perdure run`, to its end."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from perdure.drill.damage import damage
from perdure.drill.scenario import Commit, Launch, Observed, Outcome, Started
from perdure.errors import LaunchError
from perdure.store.drill import DRILL
from perdure.store.drilled import COPIES, EVENTS, PLAN, RUNS
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.supervise import history
from perdure.supervise.console import Console
from perdure.supervise.options import Limits, RunOptions
from perdure.supervise.supervisor import Observer, Supervisor
from perdure.supervise.worker import Worker

DEVICES = "JAX_NUM_CPU_DEVICES"
LOGS = "logs"
STOPPED_S = 0.5
_SPARE_RESTARTS = 2
_TAIL = 12
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DrilledProgram:
    """What is tried: a command that trains, on so many workers.

    `leave` are run directories that it only reads; they stay where they are. `cache` is where JAX
    keeps what it has compiled; None leaves that to the environment.
    """

    command: tuple[str, ...]
    workers: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    leave: tuple[str, ...] = ()
    cache: Path | None = None


def execute(
    program: DrilledProgram,
    where: Path,
    attempts: Sequence[Launch] = (),
    observed: Observed | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run `program` to its end in `where`, a directory of its own; the faults of `attempts` hit it.

    `observed` gives the limits behind which a silent program is taken for hung. Raises `LaunchError`
    where the command does not exist, `where` cannot be written to or is there already, and
    `KeyboardInterrupt`.
    """
    faults = _Faults(program, where, attempts, environment or {})
    options = RunOptions(
        workers=program.workers,
        max_restarts=len(attempts) + _SPARE_RESTARTS,
        log_directory=where / LOGS,
        limits=_limits(observed),
        compilation_cache=program.cache,
    )
    supervisor = _supervisor(program.command, options, faults)
    with _writable(where):
        _make(where)
    began = time.monotonic()
    with _writable(where):
        try:
            summary = supervisor.run()
        finally:
            faults.close()
    if summary.asked is not None:  # a signal to us; whatever else happened, no fault did it
        raise KeyboardInterrupt
    outcome = faults.outcome
    outcome.began, outcome.seconds = began, summary.seconds
    if summary.status != 0:
        outcome.problem = outcome.problem or summary.reason
        outcome.log = _last_words(where / LOGS)
    return outcome


class _Faults(Observer):
    """Prepares every attempt, does what is done from outside, and takes down what happened."""

    def __init__(
        self,
        program: DrilledProgram,
        where: Path,
        attempts: Sequence[Launch],
        environment: Mapping[str, str],
    ) -> None:
        self._program = program
        self._where = where
        self._attempts = attempts
        self._environment = {**program.environment, **environment, DRILL: str(where)}
        self._workers = program.workers
        self._devices: int | None = None
        self._now = Launch()
        self._started: list[Worker] = []
        self._timer: threading.Timer | None = None
        self._read = 0
        self.outcome = Outcome()

    def workers(self, attempt: int, planned: int) -> int:
        """The attempt begins: its plan is written, and what was lying about is damaged."""
        self._now = self._attempts[attempt - 1] if attempt <= len(self._attempts) else Launch()
        self._started = []
        now, fired = self._now, self.outcome.fired
        if now.damage:
            said = damage(self._where / RUNS, now.damage, now.place)
            if said is not None:
                fired.append(said)
        if now.devices is not None:
            self._devices = now.devices
            fired.append(f"on {now.devices} devices")
        if now.workers is not None:
            self._workers = now.workers
            fired.append(f"on {now.workers} workers")
        faults = [
            {"id": f"{attempt}-{at}", **{k: v for k, v in asdict(fault).items() if v is not None}}
            for at, fault in enumerate(now.inside)
        ]
        plan = {"attempt": attempt, "faults": faults, "leave": self._program.leave}
        (self._where / PLAN).write_text(json.dumps(plan))
        return self._workers

    def environment(self, attempt: int, worker: int) -> Mapping[str, str]:
        """The way to the plan; a number of devices where one was drawn."""
        devices = {} if self._devices is None else {DEVICES: str(self._devices)}
        return {**self._environment, **devices}

    def started(self, worker: Worker) -> None:
        """Behind the last worker the time of a signal from outside begins."""
        self._started.append(worker)
        if self._now.signal and len(self._started) == self._workers:
            self._timer = threading.Timer(self._now.after_s, self._send)
            self._timer.daemon = True
            self._timer.start()

    def ended(self, attempt: history.AttemptRecord) -> None:
        """Reads what the attempt has told."""
        self.close()
        outcome = self.outcome
        before = len(outcome.fired)
        done = Started(attempt.cause, attempt.seconds, attempt.workers, self._devices)
        self._collect(attempt.number, done)
        hit = before < len(outcome.fired) or self._hit
        self._hit = False
        if attempt.failure and attempt.kind != "port" and not hit and not outcome.problem:
            outcome.problem = (
                f"attempt {attempt.number} ended by itself: {attempt.cause}; no fault had hit it"
            )
            outcome.log = _last_words(self._where / LOGS, attempt.number)
        outcome.attempts.append(done)

    def close(self) -> None:
        """No signal is sent from here on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    _hit = False

    def _send(self) -> None:
        now = self._now
        chosen = self._started if now.victim is None else self._started[now.victim : now.victim + 1]
        alive = [worker for worker in chosen if worker.status is None]
        if not alive:
            return
        self._hit = True
        to = "" if self._workers == 1 else f" to worker {', '.join(str(w.index) for w in alive)}"
        self.outcome.fired.append(f"{now.signal}{to} after {now.after_s:.2f} s")
        for worker in alive:
            worker.send(signal.Signals[now.signal])

    def _collect(self, number: int, done: Started) -> None:
        path = self._where / EVENTS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines()
            self._read = file.tell()
        outcome = self.outcome
        for line in lines:
            event = json.loads(line)
            outcome.events.append(event)
            kind, step = event["e"], event.get("step")
            if kind == "fired":
                outcome.fired.append(f"{event['act']} at {event['at']}")
            elif kind == "commit":
                copy = self._where / COPIES / event["copy"]
                found = read_manifest(str(copy), step).fingerprint
                outcome.commits.append(Commit(event["run"], step, number, str(copy), found))
            elif kind == "step":
                done.first = step if done.first is None else min(done.first, step)
                done.last = step if done.last is None else max(done.last, step)
            elif kind == "restored" and done.restored is None:
                done.restored = step


def observe(program: DrilledProgram, outcome: Outcome) -> Observed:
    """What an undisturbed run has shown."""
    chief = [event for event in outcome.events if event["w"] == 0]
    steps = [event for event in chief if event["e"] == "step"]
    end = outcome.began + outcome.seconds
    first = steps[0]["t"] if steps else end
    behind = [*sorted(event["t"] for event in outcome.events if event["t"] >= first), end]
    replicas = None
    if outcome.commits:
        last = outcome.commits[-1]
        replicas = read_manifest(last.copy, last.step).recipe.get("replicas")
    return Observed(
        seconds=outcome.seconds,
        first_step_s=first - outcome.began,
        steps=tuple(event["step"] for event in steps),
        commits=tuple(sorted({commit.step for commit in outcome.commits})),
        points=Counter(event["e"] for event in chief),
        early=Counter(event["e"] for event in chief if event["t"] <= first),
        silence_s=max((b - a for a, b in pairwise(behind)), default=0.0),
        workers=program.workers,
        replicas=replicas if isinstance(replicas, int) else None,
        devices=int(program.environment.get(DEVICES) or os.environ.get(DEVICES) or 1),
        modules=tuple(steps[0].get("modules", ())) if steps else (),
    )


def read_manifest(copy: str, step: int) -> Manifest:
    """A manifest that was copied as it was committed."""
    return decode_manifest(Path(copy).read_bytes(), copy, step)


def _limits(observed: Observed | None) -> Limits:
    if observed is None:
        return Limits(stopped=STOPPED_S)
    start = max(60.0, 10 * observed.first_step_s)
    step = max(20.0, 10 * observed.silence_s)
    return Limits(start, start, start, step, step, step, step + start, STOPPED_S)


def _supervisor(command: Sequence[str], options: RunOptions, faults: Observer) -> Supervisor:
    """The supervisor, whose advice names the command that was typed. Made before anything is written,
    so that a misspelt command leaves nothing in the way of the next drill."""
    quiet = Console(io.StringIO(), io.StringIO())
    try:
        return Supervisor(command, options, console=quiet, observer=faults)
    except LaunchError as error:
        said = str(error).replace("perdure run --", "perdure drill --")
        raise LaunchError(said) from error


def _make(where: Path) -> None:
    try:
        where.mkdir(parents=True)
    except FileExistsError as error:
        raise LaunchError(
            f"{where.parent}: it holds an earlier drill ({where.name} is there already). Name another "
            f"place with --directory, or remove that one."
        ) from error


@contextlib.contextmanager
def _writable(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        space = "Free some space, or name" if error.errno in _FULL else "Name"
        raise LaunchError(
            f"{where}: the runs of the drill cannot be written there: {error}. {space} another place: "
            f"--directory"
        ) from error


def _last_words(logs: Path, attempt: int | None = None) -> str:
    """The end of the newest log that says anything."""
    pattern = "*.log" if attempt is None else f"attempt-{attempt}-*.log"
    for path in sorted(logs.glob(pattern), key=lambda p: p.stat().st_mtime, reverse=True):
        said = path.read_text(errors="replace").strip().splitlines()
        if said:
            return "\n".join(said[-_TAIL:])
    return ""
