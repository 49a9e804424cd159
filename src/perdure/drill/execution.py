"""Runs a program once under the drill, to its end, with the supervisor of `perdure run`."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import shlex
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from perdure.drill.damage import damage
from perdure.drill.fault_injection import COPIES, PLAN, RUNS
from perdure.drill.probes import probe_environment
from perdure.drill.scenario import (
    Commit,
    FiredFault,
    Launch,
    LaunchOutcome,
    Observed,
    Outcome,
    WrittenFile,
)
from perdure.drill.working_directory import ROOT, WorkingDirectory
from perdure.drill.written_files import EVENTS
from perdure.errors import CommandError, LaunchError
from perdure.store.drill_hook import DRILL
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.supervise.attempts_log import AttemptRecord
from perdure.supervise.console import Console
from perdure.supervise.options import Limits, RunOptions, checked_command
from perdure.supervise.supervisor import Observer, Supervisor
from perdure.supervise.worker import Worker
from perdure.supervise.worker_environment import default_cache

DEVICES = "JAX_NUM_CPU_DEVICES"
LOGS = "logs"
STOPPED_S = 0.5
_SPARE_RESTARTS = 2
_TAIL = 12
_ENDING = ("kill", "term", "torn")  # faults inside the program that are signals
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DrilledProgram:
    """The program that is drilled.

    Attributes:
        command: The program and its arguments.
        working: The working directory, of which each run gets a copy.
        workers: Processes of the group.
        environment: Variables on top of those of this process.
        read_only: Real paths of run directories that the program only reads.
        cache: Where JAX keeps compiled programs; None leaves that to the environment.
    """

    command: tuple[str, ...]
    working: WorkingDirectory
    workers: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    read_only: tuple[str, ...] = ()
    cache: Path | None = None

    @staticmethod
    def here(
        command: Sequence[str],
        directory: Path,
        workers: int = 1,
        read_only: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        is_cached: bool = True,
    ) -> DrilledProgram:
        """A program that runs in copies of the present working directory, without `directory`.

        If `is_cached`, the compiled programs are kept in there: the first run compiles, and the others
        show that the cache is exact.
        """
        real = tuple(os.path.realpath(path) for path in read_only)
        return DrilledProgram(
            tuple(command),
            WorkingDirectory(Path.cwd(), [directory], real),
            workers,
            environment or {},
            real,
            directory / "compiled" if is_cached and default_cache() is not None else None,
        )


def execute(
    program: DrilledProgram,
    directory: Path,
    attempts: Sequence[Launch] = (),
    observed: Observed | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    phases: bool = False,
) -> Outcome:
    """Run `program` to its end in `directory` under the faults of `attempts`.

    Args:
        program: What to run.
        directory: Is created, and holds all that the run writes.
        attempts: Topology and faults of the first attempts; later ones have no faults.
        observed: Gives the limits after which a silent program counts as hung.
        environment: Variables on top of those of the program.
        phases: Also record which lines of the program run in each step, which slows it down.

    Raises:
        LaunchError: If the command does not exist, or `directory` exists or cannot be written to.
        KeyboardInterrupt: If this process got a signal that asked it to end.
    """
    faults = _FaultObserver(program, directory, attempts, environment or {}, phases=phases)
    options = RunOptions(
        workers=program.workers,
        max_restarts=len(attempts) + _SPARE_RESTARTS,
        log_directory=directory / LOGS,
        limits=_limits(observed),
        compilation_cache=program.cache,
    )
    _check_command(program.command)
    with writable(directory):
        _make(directory)
        root = program.working.make(directory)
    quiet = Console(io.StringIO(), io.StringIO())
    command = program.working.command(root, program.command)
    supervisor = Supervisor(command, options, console=quiet, observer=faults)
    began = faults.began = time.monotonic()
    with writable(directory):
        try:
            summary = supervisor.run()
        finally:
            faults.close()
    if summary.signal is not None:  # sent to this process, and no fault of the drill
        raise KeyboardInterrupt
    outcome = faults.outcome
    outcome.began, outcome.seconds = began, summary.seconds
    outcome.files = written_files(directory, program.working.source, outcome.events)
    if summary.status != 0:
        outcome.problem = outcome.problem or summary.reason
        outcome.log = log_tail(directory / LOGS, summary.attempts)
    return outcome


class _FaultObserver(Observer):
    """Prepares every attempt, sends signals from outside, and records what happened."""

    def __init__(
        self,
        program: DrilledProgram,
        directory: Path,
        attempts: Sequence[Launch],
        environment: Mapping[str, str],
        *,
        phases: bool,
    ) -> None:
        self._program = program
        self._phases = phases
        self._directory = directory
        self._attempts = attempts
        self._probed = environment
        self._environment = {**program.environment, **environment, DRILL: str(directory)}
        self._workers = program.workers
        self._devices: int | None = None
        self._now = Launch()
        self._started: list[Worker] = []
        self._timer: threading.Timer | None = None
        self._read = 0
        self._happened: list[FiredFault] = []
        self.began = time.monotonic()
        self.outcome = Outcome()

    def workers(self, attempt: int, planned: int) -> int:
        """Begin an attempt: write its plan, and damage the newest checkpoint if that is planned."""
        self._now = self._attempts[attempt - 1] if attempt <= len(self._attempts) else Launch()
        self._started = []
        now = self._now
        if now.damage:
            done = damage(self._directory / RUNS, now.damage, now.place)
            if done is not None:
                self._fired(done)
        if now.devices is not None:
            self._devices = now.devices
            self._fired(f"on {now.devices} devices")
        if now.workers is not None:
            self._workers = now.workers
            self._fired(f"on {now.workers} workers")
        if now.plants:
            self._fired("as on another machine")
        faults = [
            {"id": f"{attempt}-{i}", **{k: v for k, v in asdict(fault).items() if v is not None}}
            for i, fault in enumerate(now.injected)
        ]
        plan = {"attempt": attempt, "faults": faults, "read_only": self._program.read_only}
        plan["phases"] = self._phases
        (self._directory / PLAN).write_text(json.dumps(plan))
        return self._workers

    def environment(self, attempt: int, worker: int) -> Mapping[str, str]:
        """The directory of the drilled run, and another number of devices if the plan has one."""
        devices = {} if self._devices is None else {DEVICES: str(self._devices)}
        probes = list(self._now.plants)
        if any(fault.act == "clock" for fault in self._now.injected):
            probes.append("jumps")
        planted = {}
        if probes and not self._probed:
            planted = probe_environment(self._directory, probes, self._environment)
        return {**self._environment, **devices, **planted}

    def started(self, worker: Worker) -> None:
        """Start the timer of a signal from outside once the last worker has started."""
        self._started.append(worker)
        if self._now.signal and len(self._started) == self._workers:
            self._timer = threading.Timer(self._now.after_s, self._send)
            self._timer.daemon = True
            self._timer.start()

    def ended(self, attempt: AttemptRecord) -> AttemptRecord:
        """Read the events of the attempt; one that a signal of the drill hit counts as killed."""
        self.close()
        outcome = self.outcome
        before = len(outcome.fired)
        done = LaunchOutcome(
            attempt.cause,
            attempt.seconds,
            attempt.workers,
            self._devices,
            began_s=attempt.began - self.began,
        )
        self._collect(attempt.number, done)
        done.faults, self._happened = self._happened, []
        hit = before < len(outcome.fired) or self._hit
        # A launcher such as torchrun exits with 1 whatever ended its processes, and a program that
        # fails before its first step is not started again.
        if attempt.kind == "failed" and self._hit:
            attempt = replace(attempt, kind="killed")
        self._hit = False
        if attempt.failure and attempt.kind != "port" and not hit and not outcome.problem:
            outcome.problem = (
                f"attempt {attempt.number} ended by itself: {attempt.cause}; no fault had hit it"
            )
            outcome.log = log_tail(self._directory / LOGS, [attempt])
        outcome.attempts.append(done)
        return attempt

    def close(self) -> None:
        """Cancel a signal that was not sent yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    _hit = False  # a signal of the drill

    def _send(self) -> None:
        now = self._now
        victims = self._started
        if now.victim is not None:
            victims = victims[now.victim : now.victim + 1]
        alive = [worker for worker in victims if worker.status is None]
        if not alive:
            return
        self._hit = True
        to = "" if self._workers == 1 else f" to worker {', '.join(str(w.index) for w in alive)}"
        self._fired(f"{now.signal}{to} after {now.after_s:.2f} s")
        for worker in alive:
            worker.send(signal.Signals[now.signal])

    def _fired(self, what: str, at: float | None = None) -> None:
        """Note a fault that has happened, now or at the monotonic time `at`."""
        self.outcome.fired.append(what)
        now = time.monotonic() if at is None else at
        self._happened.append(FiredFault(what, max(0.0, now - self.began)))

    def _collect(self, number: int, done: LaunchOutcome) -> None:
        path = self._directory / EVENTS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines()
            self._read = file.tell()
        outcome = self.outcome
        earlier = max((commit.step for commit in outcome.commits), default=0)
        has_read = False
        for line in lines:
            event = json.loads(line)
            outcome.events.append(event)
            kind, step = event["e"], event.get("step")
            if kind == "fired":
                self._hit = self._hit or event["act"] in _ENDING
                self._fired(f"{event['act']} at {event['at']}", event["t"])
            elif kind == "planted" and event["what"] not in done.planted:
                done.planted.append(event["what"])
            elif kind == "read":
                has_read = True
            elif kind == "commit":
                copy = self._directory / COPIES / event["copy"]
                fingerprint = read_manifest(str(copy), step).fingerprint
                outcome.commits.append(Commit(event["run"], step, number, str(copy), fingerprint))
            elif kind == "step":
                done.first = step if done.first is None else min(done.first, step)
                done.last = step if done.last is None else max(done.last, step)
            elif kind == "restored" and done.first is None and (step or done.restored is None):
                done.restored = step  # of several run directories, that of the first step
        if done.restored is None and has_read:
            _infer_restore(done, [c.step for c in outcome.commits if c.attempt == number], earlier)


def _infer_restore(done: LaunchOutcome, commits: Sequence[int], earlier: int) -> None:
    """A program without a manager that read a checkpoint and committed later ones has restored it."""
    from_there = done.first is None or done.first > earlier
    if earlier and commits and min(commits) > earlier and from_there:
        done.restored = earlier
        done.last = max((done.last or 0, *commits))


def written_files(
    directory: Path, source: str, events: Sequence[Mapping[str, Any]]
) -> dict[str, WrittenFile]:
    """The files that a run has written and left: by path in its working directory, or the whole path.

    Args:
        directory: The directory of the drilled run.
        source: The working directory of which the run has a copy.
        events: What its processes recorded.
    """
    steps = [number for number, event in enumerate(events) if event["e"] == "step"]
    last, found = (steps or [0])[-1], {}
    drill = os.path.realpath(directory.parent) + os.sep
    real = os.path.realpath(directory) + os.sep
    copy = f"{real}{ROOT}{source}{os.sep}"
    for number, event in enumerate(events):
        if event["e"] != "written":
            continue
        path = os.path.realpath(event["path"])
        is_inside = path.startswith((f"{real}{ROOT}{os.sep}", f"{real}{RUNS}{os.sep}"))
        if os.path.isfile(path) and (is_inside or not path.startswith(drill)):
            name = path.removeprefix(copy).removeprefix(real)
            is_last = number > last and not event.get("append")
            known = found.get(name)
            found[name] = WrittenFile(
                path, is_last and (known is None or known.is_export), not is_inside
            )
    return found


def observe(program: DrilledProgram, outcome: Outcome) -> Observed:
    """Summarize an undisturbed run."""
    chief = [event for event in outcome.events if event["w"] == 0]
    steps = [event for event in chief if event["e"] == "step"]
    end = outcome.began + outcome.seconds
    first = steps[0]["t"] if steps else end
    times = [*sorted(event["t"] for event in outcome.events if event["t"] >= first), end]
    recipe: Mapping[str, Any] = {}
    if outcome.commits:
        last = outcome.commits[-1]
        recipe = read_manifest(last.copy, last.step).recipe
    replicas = recipe.get("replicas")
    committed = [event for event in chief if event["e"] == "commit"]
    synced = next((i for i, event in enumerate(chief) if event["e"] == "manifest.sync"), -1)
    return Observed(
        seconds=outcome.seconds,
        first_step_s=first - outcome.began,
        steps=tuple(event["step"] for event in steps),
        commits=tuple(sorted({commit.step for commit in outcome.commits})),
        points=Counter(event["e"] for event in chief),
        early=Counter(event["e"] for event in chief if event["t"] <= first),
        silence_s=max((b - a for a, b in pairwise(times)), default=0.0),
        workers=program.workers,
        replicas=replicas if isinstance(replicas, int) else None,
        devices=int(program.environment.get(DEVICES) or os.environ.get(DEVICES) or 1),
        modules=tuple(steps[0].get("modules", ())) if steps else (),
        sequence=tuple(event["step"] for event in committed),
        runs=tuple(event["run"] for event in committed),
        first_commit_s=committed[0]["t"] - outcome.began if committed else 0.0,
        before_commit=Counter(event["e"] for event in chief[: synced + 1]),
        versions=steps[0].get("versions", {}) if steps else {},
        recipe=dict(recipe),
    )


def phases_of(outcome: Outcome) -> dict[tuple[str, int], object]:
    """The phase of each checkpoint: what ran before and after it, and which leaves changed.

    Two checkpoints are of one phase if the same lines of the program ran in the steps since the
    checkpoint before, and until the next one, and the same leaves changed.
    """
    chief = [event for event in outcome.events if event["w"] == 0]
    lines = [(event["step"], event["lines"]) for event in chief if event.get("lines")]
    found: dict[tuple[str, int], object] = {}
    for run in dict.fromkeys(commit.run for commit in outcome.commits):
        commits = sorted((c for c in outcome.commits if c.run == run), key=lambda c: c.step)
        hashes: list[dict[str, object]] = []
        for manifest in (read_manifest(commit.copy, commit.step) for commit in commits):
            hashes.append({"metric epoch": manifest.metrics.get("epoch")})  # of Keras `fit`
            hashes[-1] |= {leaf.path: (leaf.text, *leaf.hashes()) for leaf in manifest.leaves}
        spans = []
        for a, b in zip([None, *commits], [*commits, None], strict=True):
            first, last = a.step if a else -1, b.step if b else math.inf
            ran = frozenset(sign for step, sign in lines if first < step <= last)
            spans.append(ran)
        changed = [
            frozenset(path for path, known in new.items() if old.get(path, known) != known)
            for old, new in pairwise([{}, *hashes])
        ]
        changed.append(frozenset())
        around = [*zip(spans, changed, strict=True)]
        for number, commit in enumerate(commits):
            found[run, commit.step] = (around[number], around[number + 1])
    return found


def read_manifest(copy: str, step: int) -> Manifest:
    """Decode the copy of a manifest that was made when it was committed."""
    return decode_manifest(Path(copy).read_bytes(), copy, step)


def _limits(observed: Observed | None) -> Limits:
    if observed is None:
        return Limits(stopped=STOPPED_S)
    start = max(60.0, 10 * observed.first_step_s)
    step = max(20.0, 10 * observed.silence_s)
    return Limits(start, start, start, step, step, step, step + start, STOPPED_S)


def _check_command(command: Sequence[str]) -> None:
    """Raise `CommandError` for a misspelt command, before anything is written."""
    script = command[0] if command else ""
    if script.endswith(".py") and Path(script).is_file() and shutil.which(script) is None:
        line = shlex.join(("python", *command))
        raise CommandError(f"{script}: expected a command. Write: perdure drill -- {line}")
    checked_command(command, "perdure drill --")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError as error:
        raise holds_earlier_drill(directory) from error


def holds_earlier_drill(part: Path) -> LaunchError:
    """The error for a place where `part` of an earlier drill is found."""
    return LaunchError(
        f"{part.parent}: it holds an earlier drill ({part.name} exists). Name another place with "
        f"--directory, or remove that one."
    )


@contextlib.contextmanager
def writable(directory: Path) -> Iterator[None]:
    """Turn an error of the disk into a `LaunchError` that names the directory."""
    try:
        yield
    except OSError as error:
        space = "Free some space, or name" if error.errno in _FULL else "Name"
        raise LaunchError(
            f"{directory}: the runs of the program cannot be written there: {error}. {space} another "
            f"place with --directory"
        ) from error


def log_tail(logs: Path, attempts: Sequence[AttemptRecord]) -> str:
    """The last lines of the log of a worker that failed by itself, or else of the newest log.

    The newest log alone would not do: after a failure the other workers are killed, and theirs may end
    within a line.
    """
    paths = sorted(logs.glob("attempt-*.log"), key=lambda p: p.stat().st_mtime, reverse=True)
    failed = [
        logs / f"attempt-{last.number}-worker-{index}.log"
        for last in attempts[-1:]
        for index, status in enumerate(last.statuses)
        if status not in (0, -signal.SIGKILL)
    ]
    paths.sort(key=lambda path: path not in failed)
    for path in paths:
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            return "\n".join(lines[-_TAIL:])
    return ""
