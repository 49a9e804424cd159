"""`Supervisor`: starts the workers of a run, watches them, and restarts them until they are done.

One thread with one loop waits until a worker writes or ends, and reads the heartbeats ten times a
second. Invariant: when `run` returns or raises, no process of the run is left; if this process is
killed, the orphan reaper ends them.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from perdure.errors import LaunchError
from perdure.runtime import heartbeats
from perdure.runtime.heartbeats import Beat
from perdure.runtime.ports import free_ports
from perdure.runtime.process_group import ATTEMPT
from perdure.runtime.system import IS_LINUX, signals
from perdure.supervise.attempt import PREEMPTED, Attempt
from perdure.supervise.attempts_log import (
    DEFAULT_LOGS,
    FILE,
    AttemptRecord,
    AttemptsLog,
    RunHistory,
    describe_process,
    encodable,
    read_runs,
    timestamp,
)
from perdure.supervise.console import Console
from perdure.supervise.options import RunOptions, checked_command
from perdure.supervise.orphan_reaper import MARK, OrphanReaper, end_marked, marked
from perdure.supervise.policy import Decision, cannot_come_back, decide, decide_exclusion
from perdure.supervise.silence import Silence
from perdure.supervise.warm_worker import WarmWorkers
from perdure.supervise.worker import Worker
from perdure.supervise.worker_environment import (
    DESCRIPTIONS,
    cache_variables,
    device_variables,
    drop_recent,
    excluded_variables,
    worker_variables,
)
from perdure.text import quoted

ASKING = signals("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""The signals that ask for a save and the end of the run."""
PROGRESS_S = 30.0
"""Seconds between two lines of the log about the step of a run."""
SAVES_AT_ONCE = 4
"""So many lines of an attempt about a save or a restore do not wait for that."""


class Observer:
    """Sees and changes a run while it goes on; this base class does neither."""

    def workers(self, attempt: int, planned: int) -> int:
        """Return how many workers the attempt gets."""
        return planned

    def environment(self, attempt: int, worker: int) -> Mapping[str, str]:
        """Return variables for one worker, on top of all others."""
        return {}

    def started(self, worker: Worker) -> None:
        """Is called after a worker was started."""

    def beat(self, worker: Worker, beat: Beat) -> None:
        """Is called with every new heartbeat of a worker; see `RunOptions.poll`."""

    def ended(self, attempt: AttemptRecord) -> AttemptRecord:
        """Return the record of an attempt of which no process is left, as it shall be judged."""
        return attempt


class Supervisor:
    """Runs a command as a group of workers. `run` may be called once.

    If `run` is called on the main thread, the signals in `ASKING` ask the workers to save and exit.

    Args:
        command: The program and its arguments.
        options: How to start, watch and restart it.
        console: Where to print lines of workers and messages.
        observer: Sees and changes the run.
        clock: The monotonic clock of the heartbeats, in seconds.

    Raises:
        LaunchError: If the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: RunOptions | None = None,
        *,
        console: Console | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = checked_command(command)
        self._options = options or RunOptions()
        self._console = console or Console()
        self._observer = observer or Observer()
        self._clock = clock
        self._warm = WarmWorkers(self._command, self._options.warm, self._message)
        self._silence = Silence(self._options.limits)
        self._mark = secrets.token_hex(8)
        self._signal: int | None = None  # the signal to pass on
        self._first_signal: int | None = None
        self._announced: int | None = None
        self._log: AttemptsLog
        self._logged_step: int | None = None
        self._next_log = -math.inf
        self._saves_at_once = 0
        self._saved = heartbeats.saved_before()
        self._all_slots = list(range(self._options.workers))
        self._slots = list(self._all_slots)
        self._excluded: dict[int, set[int]] = {}  # by slot, the devices that compute wrong numbers
        self._return_at = math.inf
        self._returns = 0

    def run(self) -> RunHistory:
        """Run to the end.

        Returns:
            What happened in all attempts.

        Raises:
            LaunchError: If the workers or their logs cannot be created.
        """
        began = self._clock()
        with ExitStack() as stack:
            stack.enter_context(self._signals())  # first, so that no signal ends this process
            stack.callback(self._console.flush)
            logs = _make_logs(self._options.log_directory)
            self._log = log = AttemptsLog(logs.absolute(), self._console.message)
            stack.callback(log.close)
            self._begin_log(logs)
            stack.push(self._log_error)
            if not IS_LINUX:
                self._message(
                    "without Linux's /proc, processes that leave the group of their worker are not "
                    "ended, nor the workers if `perdure run` itself is killed: end them by hand"
                )
            decision = self._run(logs)
            run = log.run
            run.left_behind, run.signal = len(marked(self._mark)), self._signal
            seconds = self._clock() - began
            log.add("end", status=decision.status, reason=decision.reason, seconds=seconds)
            self._console.summary(run)
            return run

    def _run(self, logs: Path) -> Decision:
        with ExitStack() as stack:
            shared = "/dev/shm"  # noqa: S108 (a directory is created in it)
            memory = shared if os.access(shared, os.W_OK) else None
            temporary = tempfile.TemporaryDirectory(prefix="perdure-", dir=memory)
            beats = Path(stack.enter_context(temporary))
            reaper = OrphanReaper(self._mark, str(beats))
            stack.callback(reaper.close)
            stack.callback(self._warm.close)
            while self._signal is None:
                attempt = self._observer.ended(self._attempt(logs, beats))
                fields = asdict(attempt)
                self._log.add("attempt_end", attempt=fields, longest=self._silence.longest)
                decision = self._decide()
                if not decision.again:
                    return decision
                wait = f" in {decision.wait:g} s" if decision.wait else ""
                reason = f"{decision.reason}; " if decision.reason else ""
                self._message(
                    f"attempt {attempt.number} ended: {attempt.explanation}; {reason}starting again"
                    f"{wait}"
                )
                self._sleep(decision.wait)
            return self._decide_end()

    @property
    def _attempts(self) -> list[AttemptRecord]:
        """The attempts that have ended."""
        return self._log.run.attempts

    # ---------------------------------------------------------------- one attempt

    def _attempt(self, logs: Path, beats: Path) -> AttemptRecord:
        number = len(self._attempts) + 1
        slots = self._choose_slots(number)
        ports = free_ports(len(slots) + 2)
        environments: dict[int, dict[str, str]] = {}
        self._log.add("attempt", attempt=number, workers=len(slots))
        self._logged_step, self._next_log = None, -math.inf
        self._saves_at_once = SAVES_AT_ONCE
        with Attempt(self._options, ports, self._silence, self._clock, self._beat) as attempt:
            for index, slot in enumerate(slots):
                heartbeat = beats / f"{number}-{index}"
                environment = self._environment(number, index, slot, len(slots), ports, heartbeat)
                saved = self._saved | self._log.run.saved
                try:
                    heartbeats.report(heartbeats.SAVED_BEFORE, saved, str(heartbeat))
                    worker = Worker(
                        self._command,
                        environment,
                        index=index,
                        slot=slot,
                        attempt=number,
                        log=logs / f"attempt-{number}-worker-{index}.log",
                        on_line=self._console.line,
                        report=self._message,
                        stamp=timestamp if self._options.timestamps else None,
                        process=self._warm.take(slot, environment),
                    )
                except OSError as error:
                    raise LaunchError(f"worker {index} could not be started: {error}") from error
                environments[slot] = environment
                attempt.add(worker)
                self._observer.started(worker)
            prepare = partial(self._warm.prepare, environments)
            end = attempt.watch(self._requested_signal, self._should_grow, prepare)
            sessions = frozenset(worker.pid for worker in attempt.workers)
            end_marked(self._mark, self._warm.pids, sessions)
        if end.kind != "done" and self._options.compilation_cache is not None:
            drop_recent(self._options.compilation_cache)
        return attempt.record(end, number)

    def _beat(self, worker: Worker, beat: Beat) -> None:
        is_due = beat.step not in (None, self._logged_step) and self._clock() >= self._next_log
        if is_due or (self._saves_at_once and beat.step is not None):
            saved = worker.reported("saved")
            # If this process is killed, what it did not log is not known to a later start.
            is_new = bool(saved.items() - self._log.run.running["saved"].items())
            if is_due or is_new:
                self._saves_at_once -= is_new and self._saves_at_once > 0
                self._logged_step, self._next_log = beat.step, self._clock() + PROGRESS_S
                fields = {"step": beat.step, "phase": beat.phase, "saved": saved}
                self._log.add("progress", attempt=worker.attempt, **fields)
        self._observer.beat(worker, beat)

    def _environment(
        self, attempt: int, index: int, slot: int, count: int, ports: list[int], heartbeat: Path
    ) -> dict[str, str]:
        options = self._options
        environment = {k: v for k, v in os.environ.items() if k not in DESCRIPTIONS}
        mark = environment.get(MARK)
        environment |= {
            "PYTHONUNBUFFERED": environment.get("PYTHONUNBUFFERED", "1"),
            **worker_variables(index, count, ports, options.nodes),
            **device_variables(slot, options.devices_per_worker, self._slots, options.workers),
            **excluded_variables(self._excluded.get(slot, ())),
            ATTEMPT: str(attempt),
            heartbeats.VARIABLE: str(heartbeat),
            MARK: f"{mark}:{self._mark}" if mark else self._mark,
        }
        if options.compilation_cache is not None:
            environment |= cache_variables(options.compilation_cache)
        return {**environment, **options.environment, **self._observer.environment(attempt, index)}

    # ---------------------------------------------------------------- between attempts

    def _decide(self) -> Decision:
        attempts, last = self._attempts, self._attempts[-1]
        if self._signal is not None:
            return self._decide_end()
        if last.kind == "corrupt":
            return self._exclude(last)
        elastic = self._options.elastic
        may_shrink = elastic is not None and len(self._slots) > elastic[0]
        # If all workers fail at once, a smaller group would fail, too.
        one_failed = last.place is not None
        decision = decide(attempts, self._options.max_restarts, may_shrink and one_failed)
        slot = cannot_come_back(attempts)
        if decision.again and may_shrink and slot in self._slots:
            self._slots.remove(slot)
            delay = decision.wait + self._options.return_s * 2**self._returns
            self._return_at = self._clock() + delay
            self._returns += 1
            self._message(
                f"the worker in place {slot} does not come back; continuing with "
                f"{len(self._slots)} of {len(self._all_slots)}"
            )
        return decision

    def _exclude(self, attempt: AttemptRecord) -> Decision:
        """Continue without the devices that an audit found to compute wrong numbers."""
        slot = attempt.place
        assert slot is not None
        self._excluded.setdefault(slot, set()).update(attempt.corrupt_devices)
        if attempt.devices_left:
            numbers = ", ".join(map(str, attempt.corrupt_devices))
            self._message(f"the worker in place {slot} continues without its device {numbers}")
        else:
            self._all_slots.remove(slot)
            self._slots = [kept for kept in self._slots if kept != slot]
            self._message(f"continuing without the worker in place {slot}: it has no other device")
        changes_group = self._options.nodes is not None and not attempt.devices_left
        return decide_exclusion(
            self._attempts, self._options.max_restarts, len(self._slots), changes_group
        )

    def _decide_end(self) -> Decision:
        """What to exit with after a signal."""
        name = signal.Signals(self._first_signal or self._signal or 0).name
        status, reason = 128 + (self._signal or 0), f"ended by {name}"
        if not self._attempts:
            return Decision(False, status=status, reason=f"{name}: no worker was started yet")
        statuses = self._attempts[-1].statuses
        if not any(statuses):
            status, reason = 0, "finished"
        elif all(each in (0, PREEMPTED) for each in statuses):
            status, reason = PREEMPTED, f"{name}: the workers have saved and exited"
        elif self._signal == signal.SIGKILL:
            reason += " and a second signal, which killed the workers without a save"
        return Decision(False, status=status, reason=reason)

    def _choose_slots(self, attempt: int) -> list[int]:
        if self._should_grow():
            self._slots = list(self._all_slots)
            self._return_at = math.inf
        planned = len(self._slots)
        count = self._observer.workers(attempt, planned)
        return self._slots if count == planned else list(range(count))

    def _should_grow(self) -> bool:
        return self._clock() >= self._return_at

    def _requested_signal(self) -> int | None:
        """The signal to pass on; reports each one once."""
        number = self._signal
        if number is not None and number != self._announced:
            self._announced = number
            if number == signal.SIGKILL:
                self._message("a second signal: the workers are killed without a save")
            else:
                self._message(
                    f"{signal.Signals(number).name}: the workers are asked to save and exit, within "
                    f"{self._options.grace:g} s; a second signal kills them"
                )
        return number

    # ---------------------------------------------------------------- messages and the log

    def _message(self, text: str) -> None:
        self._console.message(f"{timestamp()} {text}" if self._options.timestamps else text)
        self._log.add("message", text=text)

    def _log_error(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
            self._log.add("end", status=1, reason=reason, seconds=0.0)

    def _begin_log(self, logs: Path) -> None:
        """Write the first line, and take over what earlier runs have logged: of all, what was saved;
        of those of the same command, the silence to expect."""
        directory = self._options.log_directory or Path(DEFAULT_LOGS)
        program = encodable([list(self._command), os.getcwd()])
        runs: list[RunHistory] = []
        with suppress(OSError):
            runs = read_runs(directory)
        for run in runs:
            self._saved |= run.saved
        runs = [run for run in runs if [*run.program] == program]
        for run in runs:
            self._silence.learn(run.longest)
        self._log.add(
            "start",
            command=list(self._command),
            directory=os.getcwd(),
            workers=self._options.workers,
            logs=str(logs.absolute()),
            **describe_process(os.getpid()),
        )
        if runs and runs[-1].state == "lost":
            self._message(
                f"an earlier run of this command ended without a word ({runs[-1].last_time}); "
                f"`perdure status {quoted(directory)}` shows both"
            )

    def _sleep(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._signal is None and (left := until - self._clock()) > 0:
            time.sleep(min(left, self._options.poll))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: FrameType | None) -> None:
            # A closed terminal (SIGHUP) and Ctrl-\ (SIGQUIT) ask to save and exit, as SIGTERM does. A
            # second signal kills the workers without a save.
            asks = number in (signal.SIGHUP, signal.SIGQUIT)
            first = signal.SIGTERM if asks else number
            self._first_signal = self._first_signal or first
            self._signal = signal.SIGKILL if self._signal is not None else first

        before: dict[int, Any] = {}
        try:
            for number in ASKING:
                # nohup ignores SIGHUP on purpose. Background jobs of a shell ignore SIGINT, but whoever
                # sends SIGINT to this process means it.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    before[number] = signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _make_logs(named: Path | None) -> Path:
    """A directory for the logs: that of this name, or run-2, run-3, ... in it if it has logs."""
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    directory = named or Path(DEFAULT_LOGS) / name
    candidate, number = directory, 1
    try:
        while True:
            candidate.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                has_logs = any(candidate.glob("attempt-*.log"))
                if not has_logs and not os.path.lexists(candidate / FILE):
                    (candidate / "attempt-1-worker-0.log").open("xb").close()
                    return candidate
            number += 1
            candidate = directory / f"run-{number}"
    except OSError as error:
        raise LaunchError(
            f"{directory}: the logs of the workers cannot be written there: {error}; name another "
            "place with --log-dir"
        ) from error
