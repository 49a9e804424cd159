"""`Attempt`: the workers of one attempt, watched until the attempt is over.

Invariant: a group needs all its members, so the first failure ends the others at once, without a
signal that they could answer with a save that needs the one that is gone.
"""

from __future__ import annotations

import math
import selectors
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.heartbeats import Beat
from perdure.ports import taken
from perdure.supervise.history import AttemptRecord, Kind
from perdure.supervise.options import RunOptions
from perdure.supervise.silence import Silence
from perdure.supervise.worker import Worker

PREEMPTED = 75  # perdure.checkpoint.EXIT_PREEMPTED, without its imports
LOOK_S = 1.0  # between two looks whether a process is stopped
# A program that cannot start fails in every worker within about this time.
TOGETHER_S = 2.0
OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


class Watcher(Protocol):
    def beat(self, worker: Worker, beat: Beat) -> None: ...


@dataclass(frozen=True)
class AttemptEnd:
    """Why an attempt is over."""

    kind: Kind
    cause: str
    worker: Worker | None = None


class Attempt:
    """A context: leaving it kills what still runs, and frees what belongs to it."""

    def __init__(
        self,
        options: RunOptions,
        observer: Watcher,
        clock: Callable[[], float],
        silence: Silence,
    ) -> None:
        self._options = options
        self._silence = silence
        self._observer = observer
        self._clock = clock
        self.workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._stopped: dict[Worker, float] = {}
        self._steps: dict[Worker, tuple[int, float]] = {}
        self._starts: dict[Worker, int] = {}
        self._firsts: dict[Worker, tuple[float, int | None]] = {}
        self._looked = -math.inf
        self._noticed = 0.0
        self._deadline: float | None = None
        self._growing = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:  # each is closed, whatever becomes of the others
            stack.callback(self._selector.close)
            for worker in reversed(self.workers):
                stack.callback(self._step, worker)
                stack.callback(worker.close)
            for worker in self.workers:
                worker.kill()

    def add(self, worker: Worker) -> None:
        """Watch `worker` too."""
        self.workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        self._selector.register(worker.exit, selectors.EVENT_READ, worker)

    def watch(
        self,
        asked: Callable[[], int | None],
        should_grow: Callable[[], bool],
        settled: Callable[[], None],
        ports: list[int],
    ) -> AttemptEnd:
        """Watch until all have ended or one has failed; then kill the others.

        `asked` gives the signal to pass on, `should_grow` whether a larger group could be tried;
        `settled` is called once every worker has done a step.
        """
        passed: int | None = None
        unsettled = True
        while True:
            self._wait()
            if unsettled and self._stepping():
                unsettled = False
                settled()
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

    def record(self, found: AttemptEnd, number: int, began: float) -> AttemptRecord:
        """What is remembered of the attempt, once it is closed."""
        now = self._clock()
        starts = list(self._starts.values())
        ends = [step for step, _ in self._steps.values()]
        first, first_step = min(self._firsts.values(), default=(None, None))
        return AttemptRecord(
            number=number,
            workers=len(self.workers),
            kind=found.kind,
            cause=found.cause,
            place=None if found.worker is None else found.worker.place,
            statuses=tuple(worker.process.returncode for worker in self.workers),
            start=starts[0] if starts else None,
            end=max(ends, default=None),
            began=began,
            first=first,
            first_step=first_step,
            last=max((when for _, when in self._steps.values()), default=None),
            noticed=self._noticed,
            seconds=now - began,
            **self._of_the_first_to_fail(found),
        )

    def _of_the_first_to_fail(self, found: AttemptEnd) -> dict[str, Any]:
        if found.worker is None:
            return {"at": max((step for step, _ in self._steps.values()), default=None)}
        step, _ = self._steps.get(found.worker, (None, 0.0))
        said = found.worker.last_line() if found.kind == "failed" else ""
        return {"at": step, "alive": found.worker in self._firsts, "said": said}

    # ---------------------------------------------------------------- looking

    def _wait(self) -> None:
        for key, _ in self._selector.select(self._options.poll):
            worker: Worker = key.data
            # An exit is found by its status; its end of the pipe would wake this loop for ever.
            if key.fd == worker.exit or not worker.listen():
                self._selector.unregister(key.fd)
        for worker in self.workers:
            before = worker.beat
            if worker.look() and worker.beat is not None:
                self._silence.heard(worker, before, worker.beat)
                self._step(worker)
                self._observer.beat(worker, worker.beat)

    def _step(self, worker: Worker) -> None:
        beat = worker.beat
        if beat is None:
            return
        # What was seen stays: a later beat may be that of another loop, which begins anew.
        if beat.start is not None:
            self._starts.setdefault(worker, beat.start)
        if beat.first is not None:
            self._firsts.setdefault(worker, (beat.first, beat.first_step))
        if beat.step is None or beat.phase == "restore":
            return
        if worker not in self._steps or beat.step != self._steps[worker][0]:
            self._steps[worker] = (beat.step, beat.time)

    def _stepping(self) -> bool:
        return all(worker in self._firsts for worker in self.workers)

    def _ask(self, number: int) -> None:
        for worker in self.workers:
            worker.send(number)
        self._deadline = self._clock() + self._options.grace

    # ---------------------------------------------------------------- judging

    def _judge(self, passed: int | None) -> AttemptEnd | None:
        statuses = [worker.status for worker in self.workers]
        leaving = passed is not None or self._growing
        failed = [
            (worker, status)
            for worker, status in zip(self.workers, statuses, strict=True)
            if status not in (None, 0, PREEMPTED)
        ]
        if failed and not leaving:
            # Those that lose a member fail a moment later, with an error of their own.
            return self._failed(*min(failed, key=lambda each: each[1] not in OUTSIDE))
        if None not in statuses:
            return self._all_left(statuses, passed)
        if PREEMPTED in statuses and self._deadline is None:
            self._deadline = self._clock() + self._options.grace
        if self._deadline is not None and self._clock() >= self._deadline:
            name = "ended" if passed is not None else "preempted"
            late = [w.index for w, s in zip(self.workers, statuses, strict=True) if s is None]
            return AttemptEnd(
                "resized" if self._growing else name,
                f"workers {late} were asked to leave and had not left after {self._options.grace:g} s",
            )
        return self._silent()

    def _all_left(self, statuses: list[int | None], passed: int | None) -> AttemptEnd:
        if passed is not None:
            return AttemptEnd("ended", f"{signal.Signals(passed).name} was passed on")
        if not any(statuses):
            return AttemptEnd("done", "exit 0")
        if self._growing:
            if PREEMPTED in statuses:
                return AttemptEnd("resized", "saved and left, to go on with more workers")
            # Asked to leave, it ended without a word that it has saved.
            ends = zip(self.workers, statuses, strict=True)
            return self._failed(*next(each for each in ends if each[1]))
        if PREEMPTED in statuses:
            return AttemptEnd(
                "preempted", f"exit {PREEMPTED}: saved, and wants to be started again"
            )
        raise AssertionError(statuses)  # any other status was judged before

    def _failed(self, worker: Worker, status: int | None) -> AttemptEnd:
        assert status is not None
        kind: Kind = "killed" if status in OUTSIDE else "failed"
        return AttemptEnd(kind, f"worker {worker.index}: {_how(status)}", worker)

    def _silent(self) -> AttemptEnd | None:
        now, limits = self._clock(), self._options.limits
        if now - self._looked >= min(LOOK_S, limits.stopped / 4):
            self._looked = now
            for worker in self.workers:
                if worker.stopped():
                    self._stopped.setdefault(worker, now)
                else:
                    self._stopped.pop(worker, None)
        for worker, since in self._stopped.items():
            if now - since >= limits.stopped:
                return AttemptEnd(
                    "stopped",
                    f"worker {worker.index}: stopped (SIGSTOP) for {now - since:.1f} s, limit "
                    f"{limits.stopped:g} s",
                    worker,
                )
        hung: list[tuple[float, Worker, Beat, float]] = []
        for worker in self.workers:
            beat = worker.beat
            if beat is None or worker.status is not None:
                continue
            limit = self._silence.limit(beat.phase)
            if self._silence.is_hung(worker, beat, now):
                hung.append((beat.time, worker, beat, limit))
        if not hung:
            return None
        _, worker, beat, limit = min(hung, key=lambda each: each[0])
        return AttemptEnd(
            "hung",
            f"worker {worker.index}: no heartbeat for {now - beat.time:.1f} s in the phase "
            f"{beat.phase}, limit {limit:g} s",
            worker,
        )

    def _explained(self, found: AttemptEnd, ports: list[int]) -> AttemptEnd:
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
                return AttemptEnd("port", f"{found.cause}; port {strangers[0]} is in use", None)
            if all_failed:
                return AttemptEnd(found.kind, found.cause, None)
        return found

    def _any_stepped(self) -> bool:
        return bool(self._firsts)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
