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

from perdure.runtime.excluded_devices import CorruptionReport
from perdure.runtime.heartbeats import Beat
from perdure.runtime.ports import is_taken
from perdure.supervise.history import AttemptRecord, Kind
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
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class AttemptEnd:
    """Why an attempt is over."""

    kind: Kind
    cause: str
    worker: Worker | None = None
    last_line: str = ""
    exception: str = ""
    corruption: CorruptionReport | None = None


class Attempt:
    """The workers of one attempt; the end of the `with` block kills them and closes their files.

    Args:
        options: How to watch the workers.
        on_beat: Is called with each new heartbeat.
        clock: The monotonic clock of the heartbeats, in seconds.
        silence: When a silent worker counts as hung.
        is_held: Returns whether the output of the workers should wait for its reader.
    """

    def __init__(
        self,
        options: RunOptions,
        on_beat: Callable[[Worker, Beat], None],
        clock: Callable[[], float],
        silence: Silence,
        is_held: Callable[[], bool],
    ) -> None:
        self._options = options
        self._silence = silence
        self._on_beat = on_beat
        self._clock = clock
        self.workers: list[Worker] = []
        self._is_held = is_held
        self._selector = selectors.DefaultSelector()
        self._exits = selectors.DefaultSelector()
        # When the workers were last looked at: on the clock of this process, and on `clock`.
        self._looked: float | None = None
        self._now = -math.inf
        self._stopped: dict[Worker, float] = {}
        # Newest step and when it was finished, step at the start, first new step and its time.
        self._steps: dict[Worker, tuple[int, float]] = {}
        self._starts: dict[Worker, int] = {}
        self._firsts: dict[Worker, tuple[float, int | None]] = {}
        self._checked = -math.inf
        self._noticed = 0.0
        self._deadline: float | None = None
        self._failed_exit: str = ""
        self._growing = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:  # every worker is closed, even if another cannot be
            stack.callback(self._selector.close)
            stack.callback(self._exits.close)
            for worker in reversed(self.workers):
                stack.callback(self._note_step, worker)
                stack.callback(worker.close)
            for worker in self.workers:
                worker.kill()

    def add(self, worker: Worker) -> None:
        """Add a worker that was started."""
        self.workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        for selector in (self._selector, self._exits):
            selector.register(worker.exit, selectors.EVENT_READ, worker)

    def watch(
        self,
        requested_signal: Callable[[], int | None],
        should_grow: Callable[[], bool],
        on_progress: Callable[[], None],
        ports: list[int],
    ) -> AttemptEnd:
        """Watch until all workers have ended or one has failed; then kill the others.

        Args:
            requested_signal: Returns the signal to pass on to the workers, or None.
            should_grow: Returns whether a larger group should be tried.
            on_progress: Is called once, when every worker has finished a step.
            ports: The ports of the attempt, to find out whether a stranger listens on one.
        """
        passed: int | None = None
        progressed = False
        while True:
            self._wait()
            if not progressed and self._all_stepped():
                progressed = True
                on_progress()
            requested = requested_signal()
            if requested is not None and requested != passed:
                passed = requested
                self._request_exit(requested)
            elif passed is None and not self._growing and should_grow() and self._all_stepped():
                self._growing = True
                self._request_exit(signal.SIGTERM)
            end = self._judge(passed)
            if end is not None:
                self._noticed = self._clock()
                return self._finish(end, ports)

    def record(self, end: AttemptEnd, number: int, began: float) -> AttemptRecord:
        """The record of the attempt, to be made once its workers are closed."""
        now = self._clock()
        starts = list(self._starts.values())
        newest = max((step for step, _ in self._steps.values()), default=None)
        first_time, first_step = min(self._firsts.values(), default=(None, None))
        return AttemptRecord(
            number=number,
            workers=len(self.workers),
            kind=end.kind,
            cause=end.cause,
            place=None if end.worker is None else end.worker.place,
            statuses=tuple(worker.process.returncode for worker in self.workers),
            start=starts[0] if starts else None,
            end=newest,
            began=began,
            first_time=first_time,
            first_step=first_step,
            last_time=max((when for _, when in self._steps.values()), default=None),
            noticed=self._noticed,
            seconds=now - began,
            last_step=newest if end.worker is None else self._steps.get(end.worker, (None,))[0],
            made_progress=end.worker in self._firsts,
            last_line=end.last_line,
            exception=end.exception,
            corrupt_devices=() if end.corruption is None else end.corruption.devices,
            devices_left=None if end.corruption is None else end.corruption.left,
            saved={path: step for worker in self.workers for path, step in worker.saved().items()},
        )

    # ---------------------------------------------------------------- watching

    def _wait(self) -> None:
        # Workers that were asked to exit may have much to write before they can.
        held = self._deadline is None and self._is_held()
        for key, _ in (self._exits if held else self._selector).select(self._options.poll):
            worker: Worker = key.data
            # The status of a worker shows its exit; a closed pipe would wake this loop for ever.
            if key.fd == worker.exit:
                self._exits.unregister(key.fd)
                self._selector.unregister(key.fd)
            elif (self._deadline is not None or not self._is_held()) and not worker.listen():
                self._selector.unregister(key.fd)
        self._skip_unwatched(held)
        for worker in self.workers:
            before = worker.beat
            if worker.read_beat() and worker.beat is not None:
                self._silence.heard(worker, before, worker.beat)
                self._note_step(worker)
                self._on_beat(worker, worker.beat)

    def _skip_unwatched(self, held: bool) -> None:
        """Leave out the time since the last call if nobody could watch the workers in it."""
        self._now = self._clock()
        before, self._looked = self._looked, time.monotonic()
        if before is None:
            return
        seconds = self._looked - before
        if held or seconds > self._options.poll + SUSPENDED_S:
            self._silence.skip(self._now - seconds, self._now)
            if self._deadline is not None:
                self._deadline += seconds

    def _note_step(self, worker: Worker) -> None:
        beat = worker.beat
        if beat is None:
            return
        # The first values stay: a later beat may come from another loop, which begins again.
        if beat.start is not None:
            self._starts.setdefault(worker, beat.start)
        if beat.first is not None:
            self._firsts.setdefault(worker, (beat.first, beat.first_step))
        if beat.step is None or beat.phase == "restore":
            return
        if worker not in self._steps or beat.step != self._steps[worker][0]:
            self._steps[worker] = (beat.step, beat.time)

    def _all_stepped(self) -> bool:
        return all(worker in self._firsts for worker in self.workers)

    def _request_exit(self, number: int) -> None:
        for worker in self.workers:
            # Every signal but SIGKILL asks for a save, which programs make at SIGTERM.
            is_handled = number != signal.SIGKILL and worker.catches(signal.SIGTERM)
            worker.send(signal.SIGTERM if is_handled else number)
        self._deadline = self._clock() + self._options.grace

    # ---------------------------------------------------------------- judging

    def _judge(self, passed: int | None) -> AttemptEnd | None:
        statuses = [worker.status for worker in self.workers]
        exiting = passed is not None or self._growing
        failed = [
            (worker, status)
            for worker, status in zip(self.workers, statuses, strict=True)
            if status not in (None, 0, PREEMPTED)
        ]
        if failed and (end := self._refused() or self._corrupt()):
            return end
        if failed and not exiting:
            # The first cause is a signal from outside: workers that lose a member fail a moment later.
            return self._failed(*min(failed, key=lambda failure: not _is_outside(failure[1])))
        if None not in statuses:
            return self._all_ended(statuses, passed)
        if PREEMPTED in statuses and self._deadline is None:
            self._deadline = self._clock() + self._options.grace
        if failed and self._deadline is not None and not self._failed_exit:
            worker, status = failed[0]
            self._failed_exit = f" (worker {worker.index}: {_describe_status(status or 0)})"
            self._deadline = min(self._deadline, self._clock() + FAILED_EXIT_S)
        if self._deadline is not None and self._now >= self._deadline:
            return self._late(statuses, passed)
        return self._find_silent()

    def _refused(self) -> AttemptEnd | None:
        for worker in self.workers:
            if text := worker.refusal():
                return AttemptEnd("refused", f"worker {worker.index}: {text}", worker)
        return None

    def _corrupt(self) -> AttemptEnd | None:
        """The end of an attempt in which a worker reported a device that computes wrong numbers."""
        for worker in self.workers:
            if (report := worker.corruption()) is not None:
                return AttemptEnd(
                    "corrupt", f"worker {worker.index}: {report.text}", worker, corruption=report
                )
        return None

    def _late(self, statuses: list[int | None], passed: int | None) -> AttemptEnd:
        name = "ended" if passed is not None else "preempted"
        late = [w.index for w, s in zip(self.workers, statuses, strict=True) if s is None]
        after = FAILED_EXIT_S if self._failed_exit else self._options.grace
        return AttemptEnd(
            "resized" if self._growing else name,
            f"workers {late} were asked to exit and still ran {after:g} s later{self._failed_exit}",
        )

    def _all_ended(self, statuses: list[int | None], passed: int | None) -> AttemptEnd:
        if passed == signal.SIGKILL:
            return AttemptEnd("ended", "killed at a second signal")
        if passed is not None:
            return AttemptEnd("ended", f"{signal.Signals(passed).name} was passed on")
        if not any(statuses):
            return AttemptEnd("done", "exit 0")
        if self._growing:
            if PREEMPTED in statuses:
                return AttemptEnd("resized", "saved and exited, to continue with more workers")
            # A worker that was asked to exit did not report that it has saved.
            ends = zip(self.workers, statuses, strict=True)
            return self._failed(*next(end for end in ends if end[1]))
        if PREEMPTED in statuses:
            return AttemptEnd("preempted", f"exit {PREEMPTED}: saved, and asks to be restarted")
        raise AssertionError(statuses)  # `_judge` handles every other status

    def _failed(self, worker: Worker, status: int | None) -> AttemptEnd:
        assert status is not None
        worker.listen()  # its last lines may say why
        kind: Kind = "killed" if _is_outside(status) else "failed"
        cause = f"worker {worker.index}: {_describe_status(status)}"
        # A killed worker may have caught the exception that it wrote.
        exception = worker.exception() if kind == "failed" and status > 0 else ""
        if kind == "failed" and worker.found_full_disk():
            kind = "full"
        if out_of_memory := worker.memory_kills():
            cause += f", {out_of_memory}"
        return AttemptEnd(kind, cause, worker, worker.last_line(), exception)

    def _find_silent(self) -> AttemptEnd | None:
        now, limits = self._now, self._options.limits
        if now - self._checked >= min(STOPPED_CHECK_S, limits.stopped / 4):
            self._checked = now
            for worker in self.workers:
                if worker.stopped():
                    self._stopped.setdefault(worker, now)
                else:
                    self._stopped.pop(worker, None)
        for worker, since in self._stopped.items():
            if (stopped := self._silence.seconds(since, now)) >= limits.stopped:
                return AttemptEnd(
                    "stopped",
                    f"worker {worker.index}: stopped (SIGSTOP) for {stopped:.1f} s, limit "
                    f"{limits.stopped:g} s",
                    worker,
                    worker.last_line(),
                )
        hung: list[tuple[float, Worker, Beat, str]] = []
        for worker in self.workers:
            beat = worker.beat
            if beat is None or worker.status is not None:
                continue
            limit = self._silence.limit(beat.phase)  # read first, because a hang lets it grow
            exceeded = self._silence.exceeded_limit(worker, beat, now)
            if exceeded is not None:
                computed = " for a worker that computes" if exceeded > limit else ""
                hung.append((beat.time, worker, beat, f"limit {exceeded:g} s{computed}"))
        if not hung:
            return None
        _, worker, beat, limit = min(hung, key=lambda silence: silence[0])
        seconds = self._silence.seconds(beat.time, now)
        return AttemptEnd(
            "hung",
            f"worker {worker.index}: no heartbeat for {seconds:.1f} s in the phase {beat.phase}, "
            f"{limit}",
            worker,
            worker.last_line(),
        )

    def _finish(self, end: AttemptEnd, ports: list[int]) -> AttemptEnd:
        """Kill the other workers, and find out whether all fail alike or a port was in use."""
        if end.kind in ("failed", "full") and self._options.elastic and not self._any_stepped():
            until = self._clock() + COMMON_FAILURE_S
            while self._clock() < until and any(w.status is None for w in self.workers):
                self._wait()
        all_failed = all(worker.status not in (None, 0) for worker in self.workers)
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()
        if end.kind in ("failed", "full") and len(self.workers) > 1 and not self._any_stepped():
            # The group is gone, so whoever listens on one of its ports is a stranger.
            strangers = [port for port in ports if is_taken(port)]
            if strangers:
                return AttemptEnd("port", f"{end.cause}; port {strangers[0]} is in use", None)
            if all_failed:
                return AttemptEnd(end.kind, end.cause, None)
        return end

    def _any_stepped(self) -> bool:
        return bool(self._firsts)


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
