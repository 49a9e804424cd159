"""`Attempt`: the workers of one attempt, watched until the attempt is over.

Invariant: a group needs all its members, so after the first failure the others are killed at once. They
get no signal that would make them save, because a save needs the worker that is gone.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from perdure.runtime.excluded_devices import REPORT as CORRUPT
from perdure.runtime.heartbeats import Beat
from perdure.runtime.ports import is_taken
from perdure.runtime.system import signals
from perdure.supervise.attempts_log import AttemptRecord, Kind
from perdure.supervise.options import RunOptions
from perdure.supervise.silence import Silence
from perdure.supervise.worker import Worker

PREEMPTED = 75  # perdure.checkpoint.EXIT_PREEMPTED, without its imports
STOPPED_CHECK_S = 1.0  # between two checks whether a process is stopped
# A program that cannot start fails in every worker within about this time.
COMMON_FAILURE_S = 2.0
# After a worker has failed in place of saving, the others rarely can save.
FAILED_EXIT_S = 5.0
# A longer time between two looks at the workers is one in which this process was suspended.
SUSPENDED_S = 1.0
OUTSIDE = signals("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


class AttemptEnd(NamedTuple):
    """Why an attempt is over, and which worker was the first to fail."""

    kind: Kind
    cause: str
    worker: Worker | None = None


@dataclass
class Attempt:
    """The workers of one attempt; the end of the `with` block kills them and closes their files.

    `ports` tell whether a stranger listens on one, `silence` when a worker counts as hung.
    """

    options: RunOptions
    ports: list[int]
    silence: Silence
    clock: Callable[[], float]
    on_beat: Callable[[Worker, Beat], None]

    def __post_init__(self) -> None:
        self.workers: list[Worker] = []
        self._began = self.clock()
        self._selector = selectors.DefaultSelector()
        # When the workers were last looked at: on the clock of this process, and on `clock`.
        self._looked = time.monotonic()
        self._now = self._began
        self._checked = -math.inf
        self._noticed = 0.0
        self._passed: int | None = None  # the signal that was passed on
        self._deadline: float | None = None
        self._failed_exit = ""
        self._growing = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:  # every worker is closed, even if another cannot be
            stack.callback(self._selector.close)
            for worker in self.workers:
                stack.callback(worker.close)
                worker.kill()

    def add(self, worker: Worker) -> None:
        """Add a worker that was started."""
        self.workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        if worker.exit is not None:  # elsewhere the status of a worker is polled
            self._selector.register(worker.exit, selectors.EVENT_READ, worker)

    def watch(
        self,
        requested_signal: Callable[[], int | None],
        should_grow: Callable[[], bool],
        on_progress: Callable[[], None],
    ) -> AttemptEnd:
        """Watch until all workers have ended or one has failed; then kill the others.

        `requested_signal` and `should_grow` are asked, `on_progress` is called once, when every
        worker has finished a step.
        """
        progressed = False
        while True:
            self._wait()
            all_stepped = all(worker.first for worker in self.workers)
            if all_stepped and not progressed:
                progressed = True
                on_progress()
            requested = requested_signal()
            if requested is not None and requested != self._passed:
                self._passed = requested
                self._request_exit(requested)
            elif self._passed is None and not self._growing and all_stepped and should_grow():
                self._growing = True
                self._request_exit(signal.SIGTERM)
            if (end := self._judge()) is not None:
                self._noticed = self.clock()
                return self._finish(end)

    def record(self, end: AttemptEnd, number: int) -> AttemptRecord:
        """The record of the attempt, to be made once its workers are closed."""
        newest = [worker.newest for worker in self.workers if worker.newest]
        firsts = [worker.first for worker in self.workers if worker.first]
        starts = [worker.start for worker in self.workers if worker.start is not None]
        last_step = max((step for step, _ in newest), default=None)
        first_time, first_step = min(firsts, default=(None, None))
        last_line = exception = ""
        corruption: dict[str, Any] = {}
        worker = end.worker
        if worker is not None and end.kind in ("failed", "full", "killed", "hung", "stopped"):
            last_line = worker.last_line()
            # A killed worker may have caught the exception that it wrote.
            if end.kind in ("failed", "full") and worker.process.returncode > 0:
                exception = worker.exception()
        if worker is not None and end.kind == "corrupt":
            corruption = worker.reported(CORRUPT)
        return AttemptRecord(
            number=number,
            workers=len(self.workers),
            kind=end.kind,
            cause=end.cause,
            place=None if worker is None else worker.slot,
            statuses=tuple(worker.process.returncode for worker in self.workers),
            start=starts[0] if starts else None,
            end=last_step,
            began=self._began,
            first_time=first_time,
            first_step=first_step,
            last_time=max((when for _, when in newest), default=None),
            noticed=self._noticed,
            seconds=self.clock() - self._began,
            last_step=last_step if worker is None else (worker.newest or (None,))[0],
            made_progress=worker is not None and worker.first is not None,
            last_line=last_line,
            exception=exception,
            corrupt_devices=tuple(corruption.get("devices", ())),
            devices_left=corruption.get("left"),
            saved={
                path: step
                for worker in self.workers
                for path, step in worker.reported("saved").items()
            },
        )

    # ---------------------------------------------------------------- watching

    def _wait(self) -> None:
        for key, _ in self._selector.select(self.options.poll):
            worker: Worker = key.data
            # The status of a worker shows its exit; a closed pipe would wake this loop for ever.
            if key.fd == worker.exit or not worker.listen():
                self._selector.unregister(key.fd)
        self._now = self.clock()
        before, self._looked = self._looked, time.monotonic()
        seconds = self._looked - before
        if seconds > self.options.poll + SUSPENDED_S:  # nobody could watch the workers meanwhile
            self.silence.skip(self._now - seconds, self._now)
            if self._deadline is not None:
                self._deadline += seconds
        for worker in self.workers:
            last = worker.beat
            if (beat := worker.read_beat()) is not None:
                self.silence.heard(worker, last, beat)
                self.on_beat(worker, beat)

    def _request_exit(self, number: int) -> None:
        for worker in self.workers:
            # Every signal but SIGKILL asks for a save, which programs make at SIGTERM.
            is_handled = number != signal.SIGKILL and worker.catches(signal.SIGTERM)
            worker.send(signal.SIGTERM if is_handled else number)
        self._deadline = self.clock() + self.options.grace

    # ---------------------------------------------------------------- judging

    def _judge(self) -> AttemptEnd | None:
        statuses = [worker.status for worker in self.workers]
        failed = [
            (worker, status)
            for worker, status in zip(self.workers, statuses, strict=True)
            if status not in (None, 0, PREEMPTED)
        ]
        if failed and (end := self._reported()):
            return end
        if failed and self._passed is None and not self._growing:
            # The first cause is a signal from outside: workers that lose a member fail a moment later.
            return self._failed(*min(failed, key=lambda failure: not _is_outside(failure[1])))
        if None not in statuses:
            return self._all_ended(statuses)
        if PREEMPTED in statuses and self._deadline is None:
            self._deadline = self.clock() + self.options.grace
        if failed and self._deadline is not None and not self._failed_exit:
            worker, status = failed[0]
            self._failed_exit = f" (worker {worker.index}: {_describe_status(status or 0)})"
            self._deadline = min(self._deadline, self.clock() + FAILED_EXIT_S)
        if self._deadline is not None and self._now >= self._deadline:
            late = [w.index for w, s in zip(self.workers, statuses, strict=True) if s is None]
            after = FAILED_EXIT_S if self._failed_exit else self.options.grace
            said = f"workers {late} were asked to exit and still ran {after:g} s later"
            kind = "preempted" if self._passed is None else "ended"
            return AttemptEnd("resized" if self._growing else kind, said + self._failed_exit)
        return self._find_stopped() or self._find_silent()

    def _reported(self) -> AttemptEnd | None:
        """The end that a worker has reported: it must not begin again, or a device computes wrong."""
        for worker in self.workers:
            if report := worker.reported("refused"):
                return AttemptEnd("refused", f"worker {worker.index}: {report['text']}", worker)
        for worker in self.workers:
            if report := worker.reported(CORRUPT):
                return AttemptEnd("corrupt", f"worker {worker.index}: {report['text']}", worker)
        return None

    def _all_ended(self, statuses: list[int | None]) -> AttemptEnd:
        if self._passed == signal.SIGKILL:
            return AttemptEnd("ended", "killed at a second signal")
        if self._passed is not None:
            return AttemptEnd("ended", f"{signal.Signals(self._passed).name} was passed on")
        if not any(statuses):
            return AttemptEnd("done", "exit 0")
        if PREEMPTED in statuses and self._growing:
            return AttemptEnd("resized", "saved and exited, to continue with more workers")
        if PREEMPTED in statuses:
            return AttemptEnd("preempted", f"exit {PREEMPTED}: saved, and asks to be restarted")
        # A worker that was asked to exit did not report that it has saved.
        return self._failed(
            *next(end for end in zip(self.workers, statuses, strict=True) if end[1])
        )

    def _failed(self, worker: Worker, status: int | None) -> AttemptEnd:
        assert status is not None
        worker.listen()  # its last lines may say why
        kind: Kind = "failed"
        if _is_outside(status):
            kind = "killed"
        elif worker.found_full_disk():
            kind = "full"
        cause = f"worker {worker.index}: {_describe_status(status)}"
        if out_of_memory := worker.memory.kills():
            cause += f", {out_of_memory}"
        return AttemptEnd(kind, cause, worker)

    def _find_stopped(self) -> AttemptEnd | None:
        now, limit = self._now, self.options.limits.stopped
        if now - self._checked >= min(STOPPED_CHECK_S, limit / 4):
            self._checked = now
            for worker in self.workers:
                worker.note_stopped(now)
        for worker in self.workers:
            if worker.stopped_since is None:
                continue
            if (stopped := self.silence.seconds(worker.stopped_since, now)) >= limit:
                cause = f"stopped (SIGSTOP) for {stopped:.1f} s, limit {limit:g} s"
                return AttemptEnd("stopped", f"worker {worker.index}: {cause}", worker)
        return None

    def _find_silent(self) -> AttemptEnd | None:
        hung: list[tuple[float, Worker, str]] = []
        for worker in self.workers:
            beat = worker.beat
            if beat is None or worker.status is not None:
                continue
            limit = self.silence.limit(beat.phase)  # read first, because a hang lets it grow
            exceeded = self.silence.exceeded_limit(worker, beat, self._now)
            if exceeded is not None:
                seconds = self.silence.seconds(beat.time, self._now)
                computed = " for a worker that computes" if exceeded > limit else ""
                cause = (
                    f"worker {worker.index}: no heartbeat for {seconds:.1f} s in the phase "
                    f"{beat.phase}, limit {exceeded:g} s{computed}"
                )
                hung.append((beat.time, worker, cause))
        if not hung:
            return None
        _, worker, cause = min(hung, key=lambda each: each[0])
        return AttemptEnd("hung", cause, worker)

    def _finish(self, end: AttemptEnd) -> AttemptEnd:
        """Kill the other workers, and find out whether all fail alike or a port was in use."""
        has_failed = end.kind in ("failed", "full")
        if has_failed and self.options.elastic and not any(w.first for w in self.workers):
            until = self.clock() + COMMON_FAILURE_S
            while self.clock() < until and any(w.status is None for w in self.workers):
                self._wait()
        all_failed = all(worker.status not in (None, 0) for worker in self.workers)
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()
        stepped = any(worker.first for worker in self.workers)
        if has_failed and not stepped and len(self.workers) > 1:
            # The group is gone, so whoever listens on one of its ports is a stranger.
            if strangers := [port for port in self.ports if is_taken(port)]:
                return AttemptEnd("port", f"{end.cause}; port {strangers[0]} is in use")
            if all_failed:
                return AttemptEnd(end.kind, end.cause)
        return end


def _is_outside(status: int) -> bool:
    """Whether a signal from outside ended the worker, or a program that a shell ran for it."""
    return -status in OUTSIDE or status - 128 in OUTSIDE


def _describe_status(status: int) -> str:
    if status - 128 in OUTSIDE:
        return f"exit {status} ({signal.Signals(status - 128).name} in a shell)"
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
