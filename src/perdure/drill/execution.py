"""Runs a program once, to its end, with the supervisor of `perdure run`.

Every run of a program goes through `execute`: in a drill, a search for a cause, a replay, a
bisection and under the doctor. It works in a copy of the working directory.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perdure.drill.fault_injection import COPIES, PLAN, RUNS
from perdure.drill.probes import probe_environment
from perdure.drill.scenario import Commit, FiredFault, Launch, LaunchOutcome, Outcome, WrittenFile
from perdure.drill.working_directory import COPY, ROOT, WorkingDirectory, files_below
from perdure.drill.written_files import EVENTS
from perdure.errors import LaunchError
from perdure.store import Run
from perdure.store.drill_hook import DRILL
from perdure.store.format import MANIFESTS, PACKS, manifest_name, pack_step
from perdure.supervise.attempts_log import AttemptRecord
from perdure.supervise.console import Console
from perdure.supervise.options import Limits, RunOptions
from perdure.supervise.supervisor import Observer, Supervisor
from perdure.supervise.worker import Worker
from perdure.supervise.worker_environment import default_cache

DEVICES = "JAX_NUM_CPU_DEVICES"
LOGS = "logs"
STOPPED_S = 0.5
_SPARE_RESTARTS = 2
_TAIL = 12
_ENDING = ("kill", "term", "torn")  # faults inside the program that are signals
_CLOCK_TICK_S = 0.01
"""A file system stamps files with a clock that is late by at most this."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DrilledProgram:
    """The program that is drilled, and the working directory that is copied for each run.

    `read_only` are real paths of run directories that the program only reads; `cache` is where JAX
    keeps compiled programs.
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

        If `is_cached`, the first run compiles, and the others show that the cache is exact.
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
    limits: Limits | None = None,
    probes: Sequence[str] = (),
    put: Sequence[str] = (),
    *,
    devices: int | None = None,
    restarts: int | None = None,
    asked: Mapping[str, Any] | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run `program` to its end in `directory` under the faults of `attempts`.

    Later attempts have no faults. `limits` say when a silent program counts as hung; `probes`
    (names) hold for every attempt, and `put` is what "resume" puts back; `restarts` are allowed
    failures, by default a few more than faults; `asked` is what the injector does besides;
    `prepare` is called once the copy is there. Raises LaunchError if `directory` exists or cannot
    be written to, KeyboardInterrupt if this process is asked to end.
    """
    options = RunOptions(
        workers=program.workers,
        devices_per_worker=devices,
        max_restarts=len(attempts) + _SPARE_RESTARTS if restarts is None else restarts,
        log_directory=directory / LOGS,
        limits=limits or Limits(stopped=STOPPED_S),
        compilation_cache=program.cache,
    )
    observer = FaultObserver(program, directory, attempts, probes, put, asked or {})
    with writable(directory):
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise holds_earlier_runs(directory) from error
        root = program.working.make(directory)
        prepare()
        quiet = Console(io.StringIO(), io.StringIO())
        command = program.working.command(root, program.command)
        supervisor = Supervisor(command, options, console=quiet, observer=observer)
        began = observer.began = time.monotonic()
        try:
            summary = supervisor.run()
        finally:
            observer.close()
    if summary.signal is not None:  # sent to this process, and no fault of the drill
        raise KeyboardInterrupt
    outcome = observer.outcome
    outcome.began, outcome.seconds = began, summary.seconds
    outcome.files = written_files(directory, program.working.source, outcome.events)
    if summary.status != 0:
        outcome.problem = outcome.problem or summary.reason
        outcome.log = log_tail(directory / LOGS, summary.attempts)
    return outcome


@dataclass
class FaultObserver(Observer):
    """Prepares every attempt, sends signals from outside, and records what happened."""

    program: DrilledProgram
    directory: Path
    attempts: Sequence[Launch] = ()
    probes: Sequence[str] = ()
    put: Sequence[str] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._workers = self.program.workers
        self._devices: int | None = None
        self._now = Launch()
        self._started: list[Worker] = []
        self._timer: threading.Timer | None = None
        self._read = 0
        self._happened: list[FiredFault] = []
        self._hit = False  # by a signal of the drill
        self.began = time.monotonic()
        self.outcome = Outcome()

    def workers(self, attempt: int, planned: int) -> int:
        """Begin an attempt: write its plan, and damage the newest checkpoint if that is planned."""
        self._now = self.attempts[attempt - 1] if attempt <= len(self.attempts) else Launch()
        self._started = []
        now = self._now
        if now.damage:
            done = damage(self.directory / RUNS, now.damage, now.place)
            if done is not None:
                self._fired(done)
        for move in now.moves():
            self._fired(move)
        self._devices = now.devices or self._devices
        self._workers = now.workers or self._workers
        faults = [asdict(fault) for fault in now.injected]
        plan = {"attempt": attempt, "faults": faults, "read_only": self.program.read_only}
        (self.directory / PLAN).write_text(json.dumps({**plan, **self.asked}))
        return self._workers

    def environment(self, attempt: int, worker: int) -> Mapping[str, str]:
        """The directory of the drilled run, its probes, and the number of devices of the plan."""
        given = self.program.environment
        devices = {} if self._devices is None else {DEVICES: str(self._devices)}
        jumps = any(fault.act == "clock" for fault in self._now.injected)
        probes = [*self.probes, *self._now.plants, *["jumps"] * jumps]
        planted = probe_environment(self.directory, probes, given, self.put) if probes else {}
        return {**given, DRILL: str(self.directory), **devices, **planted}

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
            outcome.log = log_tail(self.directory / LOGS, [attempt])
        outcome.attempts.append(done)
        return attempt

    def close(self) -> None:
        """Cancel a signal that was not sent yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

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
        path = self.directory / EVENTS
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
                copy = str(self.directory / COPIES / event["copy"])
                commit = Commit(event["run"], step, number, copy, "")
                fingerprint = commit.manifest().fingerprint
                outcome.commits.append(replace(commit, fingerprint=fingerprint))
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
    """The files that a run has left: by path in its working directory, or the whole path."""
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
    seen = {file.path for file in found.values()}
    step = events[last]["t"] if steps and "t" in events[last] else math.inf
    ended = step + time.time() - time.monotonic() - _CLOCK_TICK_S
    made = directory / COPY
    began = made.stat().st_mtime if made.exists() else math.inf
    for path in files_below(copy):
        # What is newer than the copy and not seen was written by native code, as in `torch.save`.
        is_file = path not in seen and os.path.isfile(path) and not os.path.islink(path)
        if is_file and os.stat(path).st_mtime >= began:
            found[path.removeprefix(copy)] = WrittenFile(path, _born(path) >= ended, False)
    return found


def _born(path: str) -> float:
    """When a file was made, in seconds since 1970: before the last step if it was only written again.
    0 where the system does not say it."""
    try:
        done = subprocess.run(
            ["/usr/bin/stat", "-c", "%.6W", path], capture_output=True, text=True, check=True
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def holds_earlier_runs(part: Path) -> LaunchError:
    """The error for a place where `part` of an earlier drill or replay is found."""
    return LaunchError(
        f"{part.parent}: it holds earlier runs ({part.name} exists). Name another place with "
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

    After a failure the other workers are killed, and their logs may end within a line.
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


# ---------------------------------------------------------------- damage


def damage(runs: Path, how: str, place: float) -> str | None:
    """Damage the newest checkpoint of the run directory below `runs` that has the most checkpoints.

    "flip" a bit of what its save wrote, at `place` from 0 to 1, or "delete" its pack. Returns what
    was done, or None, with nothing done, if there is no older checkpoint.
    """
    marked = [path.parent for path in sorted(runs.glob(f"*/{MANIFESTS}")) if path.is_dir()]
    candidates = [(run.steps(), run) for run in map(Run, marked)]
    steps, run = max(candidates, key=lambda candidate: len(candidate[0]), default=([], None))
    if run is None or len(steps) < 2:
        return None
    directory, step = Path(run.where), steps[-1]
    manifest = run.manifest(step)
    packs = [pack.name for pack in manifest.packs if pack_step(pack.name) == step]
    if how == "delete":
        if not packs:
            return None
        name = packs[int(place * len(packs))]
        (directory / PACKS / name).unlink()
        return f"{PACKS}{name} of step {step} deleted"
    names = [pack.name for pack in manifest.packs]
    chunks = [chunk for leaf in manifest.leaves for chunk in leaf.chunks if chunk.length]
    written = [chunk for chunk in chunks if names[chunk.pack] in packs]
    if written:
        chunk = written[int(place * len(written))]
        name, offset = PACKS + names[chunk.pack], chunk.offset + int(place * chunk.length)
    else:  # the save wrote nothing but the manifest
        name = manifest_name(step)
        offset = int(place * (directory / name).stat().st_size)
    with (directory / name).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << int(place * 8)]))
    return f"a bit of byte {offset} of {name} flipped (step {step})"
