"""How long a worker may be silent, that is, give no heartbeat, before it counts as hung.

A limit that the user gave holds exactly. Every other one is at least twice the longest measured
silence of this run. A worker that computes gets several times the limit, and as long as an attempt
has trained; until a first step was measured it is not killed. Time in which the supervisor itself
was suspended, or waited for a slow reader, counts as no silence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from perdure.runtime.heartbeats import Beat
from perdure.supervise.options import Limits

DEFAULT_S = {
    "start": 600.0,
    "restore": 1800.0,
    "compile": 1800.0,
    "step": 600.0,
    "save": 1800.0,
    "evaluate": 3600.0,
    "end": math.inf,
}
GROWTH = 2.0
"""A limit is at least this many times the longest silence that was measured."""
BUSY = 3.0
"""A worker that computes gets this many times the limit."""
BUSY_SHARE = 0.05
"""A worker computes if it uses at least this share of one core; idle frameworks use below 1%."""
WINDOW_S = 10.0
"""Seconds over which the share is measured."""
KEPT_GAPS = 1000
"""Times without a watch that are kept; those that touch are one."""


class Process(Protocol):
    def cpu_seconds(self) -> float: ...

    def uses_accelerator(self) -> bool: ...


class Silence:
    """The limits of one run, and the longest silences that were measured in its attempts, by phase."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.longest: dict[str, float] = {}
        self._trained: dict[Process, float] = {}  # seconds between steps
        self._samples: dict[Process, tuple[float, float]] = {}
        self._unwatched: deque[tuple[float, float]] = deque(maxlen=KEPT_GAPS)

    def skip(self, begin: float, end: float) -> None:
        """From `begin` to `end` nobody watched the workers: that time counts as no silence."""
        if self._unwatched and begin <= self._unwatched[-1][1]:
            begin = self._unwatched.pop()[0]
        self._unwatched.append((begin, end))

    def seconds(self, since: float, now: float) -> float:
        """The time from `since` to `now` in which the workers were watched."""
        gaps = (min(end, now) - max(begin, since) for begin, end in self._unwatched)
        return now - since - sum(gap for gap in gaps if gap > 0)

    def learn(self, longest: Mapping[str, float]) -> None:
        """Take over what an earlier run of the same program has measured."""
        for phase, silence in longest.items():
            self._note_silence(phase, silence)

    def heard(self, worker: Process, before: Beat | None, beat: Beat) -> None:
        """Measure the silence of `worker` between `before` and `beat`."""
        self._samples.pop(worker, None)
        if before is None or before.pid != beat.pid:
            return
        silence = self.seconds(before.time, beat.time)
        self._note_silence(before.phase, silence)
        if beat.step is not None and before.step is not None and beat.step > before.step:
            # The first interval between steps is spent in the phase `compile`.
            self._note_silence("step", silence)
            self._trained[worker] = self._trained.get(worker, 0.0) + silence

    def limit(self, phase: str) -> float:
        """Seconds of silence that `phase` allows to a worker that does not compute."""
        chosen = getattr(self._limits, phase)
        if chosen is not None:
            return chosen
        return max(DEFAULT_S[phase], GROWTH * self.longest.get(phase, 0.0))

    def exceeded_limit(self, worker: Process, beat: Beat, now: float) -> float | None:
        """The limit in seconds that `worker` has exceeded since `beat`; None if it is not hung."""
        silence, limit = self.seconds(beat.time, now), self.limit(beat.phase)
        if silence <= limit:
            return None
        if getattr(self._limits, beat.phase) is None:
            is_measured = "step" in self.longest
            trained = max(self._trained.values(), default=0.0)
            most = max(BUSY * limit, trained) if is_measured else math.inf
            # In its first step, a program may wait for one long computation of an accelerator.
            if not is_measured and worker.uses_accelerator():
                return None
            if silence > most:
                # If it was never seen to compute (this process slept, say), it got the first limit.
                limit = most if worker in self._samples else limit
            elif self._may_compute(worker, now):
                return None
        # The loop may only have been slow, so the next attempt gets more time at the same place.
        self._note_silence(beat.phase, silence)
        return limit

    def _may_compute(self, worker: Process, now: float) -> bool:
        """Whether `worker` used the processor in the last window, or the window is not over yet."""
        used = worker.cpu_seconds()
        since, before = self._samples.setdefault(worker, (now, used))
        if now - since < WINDOW_S:
            return True
        self._samples[worker] = now, used
        return used - before >= BUSY_SHARE * (now - since)

    def _note_silence(self, phase: str, silence: float) -> None:
        self.longest[phase] = max(silence, self.longest.get(phase, 0.0))
