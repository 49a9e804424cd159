"""`Life`: the workers of one attempt, watched until the attempt is over.

Invariant: a group needs all its members, so the first failure ends the others at once, without a
signal that they could answer with a save that needs the one that is gone.
"""

from __future__ import annotations

import math
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from perdure.heartbeats import Beat
from perdure.supervise.environment import taken
from perdure.supervise.options import RunOptions
from perdure.supervise.record import Attempt, Kind
from perdure.supervise.worker import Worker

PREEMPTED = 75
LOOK_S = 1.0  # between two looks whether a process is stopped
# A program that cannot start fails in every worker within about this time.
TOGETHER_S = 2.0
OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


class Watcher(Protocol):
    def beat(self, worker: Worker, beat: Beat) -> None: ...


@dataclass(frozen=True)
class Found:
    """Why an attempt is over."""

    kind: Kind
    cause: str
    worker: Worker | None = None


class Life:
    """A context: leaving it kills what still runs, and frees what belongs to it."""

    def __init__(self, options: RunOptions, observer: Watcher, clock: Callable[[], float]) -> None:
        self._options = options
        self._observer = observer
        self._clock = clock
        self.workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._stopped: dict[Worker, float] = {}
        self._steps: dict[Worker, tuple[int, float]] = {}
        self._looked = -math.inf
        self._noticed = 0.0
        self._deadline: float | None = None
        self._growing = False

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.close()
            self._step(worker)
        self._selector.close()

    def add(self, worker: Worker) -> None:
        """Watch `worker` too."""
        self.workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        self._selector.register(worker.exit, selectors.EVENT_READ, worker)

    def watch(
        self, asked: Callable[[], int | None], should_grow: Callable[[], bool], ports: list[int]
    ) -> Found:
        """Watch until all have ended or one has failed; then kill the others.

        `asked` gives the signal to pass on, `should_grow` whether a larger group could be tried.
        """
        passed: int | None = None
        while True:
            self._wait()
            wanted = asked()
            if wanted is not None and wanted != passed:
                passed = wanted
                self._ask(wanted)
            elif passed is None and not self._growing and should_grow() and self._stepping():
                self._growing = True
                self._ask(signal.SIGTERM)
            found = self._judge(passed)
            if found is not None:
                self._noticed = self._clock()
                return self._explained(found, ports)

    def record(self, found: Found, number: int, began: float) -> Attempt:
        """What is remembered of the attempt, once it is closed."""
        now = self._clock()
        beats = [worker.beat for worker in self.workers if worker.beat is not None]
        chief = self.workers[0].beat
        ends = [step for step, _ in self._steps.values()]
        firsts = [each.first for each in beats if each.first is not None]
        return Attempt(
            number=number,
            workers=len(self.workers),
            kind=found.kind,
            cause=found.cause,
            place=None if found.worker is None else found.worker.place,
            statuses=tuple(worker.process.returncode for worker in self.workers),
            start=None if chief is None else chief.start,
            end=max(ends, default=None),
            began=began,
            first=min(firsts, default=None),
            last=max((when for _, when in self._steps.values()), default=None),
            noticed=self._noticed,
            seconds=now - began,
        )

    # ---------------------------------------------------------------- looking

    def _wait(self) -> None:
        for key, _ in self._selector.select(self._options.poll):
            worker: Worker = key.data
            # An exit is found by its status; its end of the pipe would wake this loop for ever.
            if key.fd == worker.exit or not worker.listen():
                self._selector.unregister(key.fd)
        for worker in self.workers:
            if worker.look() and worker.beat is not None:
                self._step(worker)
                self._observer.beat(worker, worker.beat)

    def _step(self, worker: Worker) -> None:
        beat = worker.beat
        if beat is None or beat.step is None or beat.phase == "restore":
            return
        if worker not in self._steps or beat.step != self._steps[worker][0]:
            self._steps[worker] = (beat.step, beat.time)

    def _stepping(self) -> bool:
        return all(w.beat is not None and w.beat.first is not None for w in self.workers)

    def _ask(self, number: int) -> None:
        for worker in self.workers:
            worker.send(number)
        self._deadline = self._clock() + self._options.grace

    # ---------------------------------------------------------------- judging

    def _judge(self, passed: int | None) -> Found | None:
        statuses = [worker.status for worker in self.workers]
        leaving = passed is not None or self._growing
        for worker, status in zip(self.workers, statuses, strict=True):
            if status not in (None, 0, PREEMPTED) and not leaving:
                return self._failed(worker, status)
        if None not in statuses:
            return self._all_left(statuses, passed)
        if PREEMPTED in statuses and self._deadline is None:
            self._deadline = self._clock() + self._options.grace
        if self._deadline is not None and self._clock() >= self._deadline:
            name = "ended" if passed is not None else "preempted"
            late = [w.index for w, s in zip(self.workers, statuses, strict=True) if s is None]
            return Found(
                "resized" if self._growing else name,
                f"workers {late} were asked to leave and had not left after {self._options.grace:g} s",
            )
        return self._silent()

    def _all_left(self, statuses: list[int | None], passed: int | None) -> Found:
        if passed is not None:
            return Found("ended", f"{signal.Signals(passed).name} was passed on")
        if self._growing:
            return Found("resized", "saved and left, to go on with more workers")
        if PREEMPTED in statuses:
            return Found("preempted", f"exit {PREEMPTED}: saved, and wants to be started again")
        return Found("done", "exit 0")

    def _failed(self, worker: Worker, status: int | None) -> Found:
        assert status is not None
        kind: Kind = "killed" if status in OUTSIDE else "failed"
        return Found(kind, f"worker {worker.index}: {_how(status)}", worker)

    def _silent(self) -> Found | None:
        now, limits = self._clock(), self._options.limits
        if now - self._looked >= LOOK_S:
            self._looked = now
            for worker in self.workers:
                if worker.stopped():
                    self._stopped.setdefault(worker, now)
                else:
                    self._stopped.pop(worker, None)
        for worker, since in self._stopped.items():
            if now - since >= limits.stopped:
                return Found(
                    "stopped",
                    f"worker {worker.index}: stopped (SIGSTOP) for {now - since:.1f} s, limit "
                    f"{limits.stopped:g} s",
                    worker,
                )
        hung: list[tuple[float, Worker, Beat]] = []
        for worker in self.workers:
            beat = worker.beat
            if beat is None or worker.status is not None:
                continue
            if now - beat.time > getattr(limits, beat.phase):
                hung.append((beat.time, worker, beat))
        if not hung:
            return None
        _, worker, beat = min(hung, key=lambda each: each[0])
        return Found(
            "hung",
            f"worker {worker.index}: no heartbeat for {now - beat.time:.1f} s in the phase "
            f"{beat.phase}, limit {getattr(limits, beat.phase):g} s",
            worker,
        )

    def _explained(self, found: Found, ports: list[int]) -> Found:
        """The others are killed, after a look whether they fail of themselves in the same way."""
        if found.kind == "failed" and self._options.elastic and not self._any_stepped():
            until = self._clock() + TOGETHER_S
            while self._clock() < until and any(w.status is None for w in self.workers):
                self._wait()
        all_failed = all(worker.status not in (None, 0) for worker in self.workers)
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()
        if found.kind == "failed" and len(self.workers) > 1 and not self._any_stepped():
            # With the group gone, whoever listens there is a stranger.
            strangers = [port for port in ports if taken(port)]
            if strangers:
                return Found("port", f"{found.cause}; port {strangers[0]} is in use", None)
            if all_failed:
                return Found(found.kind, found.cause, None)
        return found

    def _any_stepped(self) -> bool:
        return any(w.beat is not None and w.beat.first is not None for w in self.workers)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
