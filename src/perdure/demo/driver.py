"""Plans the demo, runs its phases with their faults, compares the results, and shows all of it."""

from __future__ import annotations

import io
import random
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from json import JSONDecoder
from pathlib import Path
from typing import Any, NamedTuple

from perdure.checkpoint.preemption import EXIT_PREEMPTED
from perdure.demo import BATCH, SAVE_EVERY
from perdure.distribute.cluster.cluster_spec import HEARTBEAT
from perdure.errors import ClusterError, NotARunError, PerdureError
from perdure.store import Run
from perdure.supervise import AttemptRecord, Observer, RunOptions, Supervisor
from perdure.supervise.console import Console
from perdure.supervise.worker import Worker
from perdure.text import counted

# How each process may end, by fault. When processes are killed one after another, one of them may see
# that another is lost before its own turn comes, and end by itself.
ENDS = {"": (0,), "SIGTERM": (EXIT_PREEMPTED,), "SIGKILL": (-9, 1)}
_TAIL = 4096


@dataclass(frozen=True)
class DemoOptions:
    engine: str
    directory: Path
    data: str | None
    epochs: int
    seed: int
    without: str | None = None


@dataclass(frozen=True)
class Phase:
    """One start of the training program; the fault is sent after the step `stop`."""

    name: str
    run: str
    devices: int
    processes: int
    fault: str = ""
    stop: int = 0

    @property
    def topology(self) -> str:
        if self.processes > 1:
            return counted(self.processes, "process", "processes")
        return counted(self.devices, "device")


def plan(engine: str, total: int, steps_per_epoch: int, seed: int) -> list[Phase]:
    """The phases of a demo of `total` steps: one undisturbed, three with faults between them."""
    rng = random.Random(seed)

    def between_saves(low: int, high: int) -> int:
        """A step after which neither a save nor the end of an epoch is due for two steps."""
        inner = (step for step in range(low, high) if step % SAVE_EVERY in (1, 2))
        return rng.choice([s for s in inner if 1 <= s % steps_per_epoch < steps_per_epoch - 2])

    kill = between_saves(total // 5, total // 2)
    term = between_saves(max(kill + SAVE_EVERY, total // 2), total - SAVE_EVERY)
    four = {"devices": 4, "processes": 1} if engine == "jax" else {"devices": 1, "processes": 4}
    return [
        Phase("uninterrupted", "plain", 1, 1),
        Phase("started", "faulted", **four, fault="SIGKILL", stop=kill),
        Phase("resumed", "faulted", 1, 2, fault="SIGTERM", stop=term),
        Phase("finished", "faulted", 1, 1),
    ]


OnEvent = Callable[[int, dict[str, Any], Sequence[Worker]], None]
"""Gets the number of a process, an event that it has printed, and the whole group."""


class GroupEnd(NamedTuple):
    """The exit status of every process (-n after signal n), and the end of its log."""

    statuses: tuple[int, ...]
    logs: tuple[str, ...]

    @property
    def status(self) -> int:
        """The most informative status: that of a signal, then a failure, then 75, then 0."""
        return min(self.statuses, key=lambda s: (s >= 0, s in (0, EXIT_PREEMPTED), s == 0, s))

    def describe(self) -> str:
        return f"exit {self.status}" if self.status >= 0 else signal.Signals(-self.status).name

    def require(self, expected: Sequence[int]) -> None:
        wrong = [n for n, status in enumerate(self.statuses) if status not in expected]
        if wrong:
            first = min(wrong, key=lambda n: self.statuses[n] == -signal.SIGKILL)
            raise ClusterError(
                f"worker {first} of {len(self.statuses)} ended with {self.statuses[first]}, expected "
                f"{' or '.join(map(str, expected))}. The end of its log:\n{self.logs[first]}"
            )


def run_group(
    command: Sequence[str],
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
    on_event: OnEvent = lambda *_: None,
) -> GroupEnd:
    """Run a command that prints events once as a group; `on_event` may kill it or send a signal."""
    with tempfile.TemporaryDirectory(prefix="perdure-") as directory:
        logs = Path(directory, "logs")
        options = RunOptions(processes, log_directory=logs, environment=environment or {})
        once = _Once()
        console = _EventConsole(lambda worker, event: on_event(worker, event, once.group))
        summary = Supervisor(command, options, console=console, observer=once).run()
        if summary.signal is not None:
            raise KeyboardInterrupt
        ends = [
            Path(logs, f"attempt-1-worker-{number}.log").read_bytes()[-_TAIL:]
            for number in range(processes)
        ]
    return GroupEnd(
        summary.attempts[0].statuses, tuple(end.decode(errors="replace") for end in ends)
    )


class _Once(Observer):
    """Keeps the processes that were started; whatever their end is, they are not started again."""

    def __init__(self) -> None:
        self.group: list[Worker] = []

    def started(self, worker: Worker) -> None:
        self.group.append(worker)

    def ended(self, attempt: AttemptRecord) -> AttemptRecord:
        return replace(attempt, kind="done")


class _EventConsole(Console):
    def __init__(self, on_event: Callable[[int, dict[str, Any]], None]) -> None:
        super().__init__(io.StringIO(), io.StringIO())
        self._on_event = on_event
        self._parts: defaultdict[int, bytes] = defaultdict(bytes)

    def line(self, worker: int, text: bytes) -> None:
        # Other output may look like an event, a killed process may leave half of one, and a library may
        # have written text without an end of line just before it: both outputs share one pipe.
        self._parts[worker] += text
        if not text.endswith(b"\n"):
            return
        whole = self._parts.pop(worker).decode(errors="replace")
        start = whole.find("{")
        while start >= 0:
            with suppress(ValueError):
                event, _ = JSONDecoder().raw_decode(whole, start)
                self._on_event(worker, event)
                return
            start = whole.find("{", start + 1)


def run_demo(options: DemoOptions, examples: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run every phase of the demo, and `say` how each ends; returns the document of `--json`.

    Raises ClusterError, with the log of the worker, if a phase ends otherwise than planned.
    """
    steps_per_epoch = -(-examples // BATCH)
    total = steps_per_epoch * options.epochs
    phases = plan(options.engine, total, steps_per_epoch, options.seed)
    finals: list[dict[str, Any]] = []
    results = []
    for phase in phases:
        try:
            results.append(_run_phase(options, phase, total, finals))
        except PerdureError as error:
            error.args = (f"phase {phase.name!r} on {phase.topology}: {error}",)
            raise
        say(f"{phase.name} on {phase.topology}: step {results[-1]['to']}, {results[-1]['ended']}")
    for before, after in pairwise(results[1:]):
        after["repeated"] = before["to"] - after["from"]
    ends = [_fingerprint(options.directory / run, total) for run in ("plain", "faulted")]
    return {
        "engine": options.engine,
        "seed": options.seed,
        "without": options.without,
        "steps": total,
        "phases": results,
        "accuracy": [final["accuracy"] for final in finals],
        "test_examples": finals[-1]["examples"],
        "fingerprints": ends,
        "pass": ends[0] is not None and ends[0] == ends[1],
    }


def _run_phase(
    options: DemoOptions, phase: Phase, total: int, finals: list[dict[str, Any]]
) -> dict[str, Any]:
    directory = options.directory / phase.run
    before = _steps(directory)
    start, done, waiting = 0, 0, bool(phase.fault)

    def on_event(worker: int, event: dict[str, Any], group: Sequence[Worker]) -> None:
        nonlocal start, done, waiting
        if worker != 0:
            return
        if event["event"] == "start":
            start = done = event["step"]
        elif event["event"] == "step":
            done = event["step"]
            # A kill waits for the first checkpoint of its phase.
            may_hit = phase.fault != "SIGKILL" or _steps(directory) != before
            if waiting and done >= phase.stop and may_hit:
                waiting = False
                for each in group:
                    each.kill() if phase.fault == "SIGKILL" else each.send(signal.SIGTERM)
        elif event["event"] == "done":
            finals.append(event)

    command = [sys.executable, "-m", f"perdure.demo.train_{options.engine}"]
    command += ["--run", str(directory), "--steps", str(total)]
    command += ["--seed", str(options.seed), "--devices", str(phase.devices)]
    command += ["--data", options.data] if options.data else []
    command += ["--without", options.without] if options.without else []
    # Without accelerators, JAX has one device per process unless it is asked for more.
    environment = {"JAX_NUM_CPU_DEVICES": str(phase.devices), "JAX_PLATFORMS": "cpu"}
    # The demo sees for itself when a process ends; on a busy machine one may be silent for longer.
    environment[HEARTBEAT] = "60"
    ended = run_group(command, phase.processes, environment, on_event)
    ended.require(ENDS[phase.fault])
    return {
        "phase": phase.name,
        "topology": phase.topology,
        "from": start,
        "to": done,
        "fault": phase.fault or None,
        "ended": ended.describe(),
        "resumed_from": before[-1] if before else None,
        "repeated": 0,
        "fingerprint": _fingerprint(directory, (_steps(directory) or [0])[-1]),
    }


def _steps(directory: Path) -> list[int]:
    try:
        return Run(directory).steps()
    except NotARunError:  # the first save makes the directory before it makes a run of it
        return []


def _fingerprint(directory: Path, step: int) -> str | None:
    return Run(directory).manifest(step).fingerprint if step in _steps(directory) else None
