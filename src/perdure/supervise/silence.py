"""How long a worker may give no heartbeat before it counts as hung.

A limit that the user gave holds as it is. Every other limit follows what was measured: it is never
below twice the longest silence of this run, so that a loop which gives one heartbeat an epoch is not
killed because its epochs are long, and a worker that still computes is given several times the limit.
"""

from __future__ import annotations

import math
from typing import Protocol

from perdure.heartbeats import Beat
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
BUSY_BEFORE_FIRST_STEP, BUSY = 10.0, 3.0
"""A worker that computes is given so many limits; more before a first step was measured."""
BUSY_SHARE = 0.05
"""A worker computes if it uses at least this share of one core. Idle frameworks use less than 1%."""
WINDOW_S = 10.0
"""The share is measured over this time."""


class Process(Protocol):
    def cpu_seconds(self) -> float: ...


class Silence:
    """The limits of one run, and the silences that were measured in all its attempts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._longest: dict[str, float] = {}
        self._samples: dict[Process, tuple[float, float]] = {}

    def heard(self, worker: Process, before: Beat | None, beat: Beat) -> None:
        """`worker` gave `beat` after `before`."""
        self._samples.pop(worker, None)
        if before is None or before.pid != beat.pid:
            return
        silence = beat.time - before.time
        self._measured(before.phase, silence)
        if beat.step is not None and before.step is not None and beat.step > before.step:
            # The first interval between steps is spent in the phase `compile`.
            self._measured("step", silence)

    def limit(self, phase: str) -> float:
        """Seconds of silence that `phase` allows to a worker that does not compute."""
        given = getattr(self._limits, phase)
        if given is not None:
            return given
        return max(DEFAULT_S[phase], GROWTH * self._longest.get(phase, 0.0))

    def is_hung(self, worker: Process, beat: Beat, now: float) -> bool:
        """Whether the silence of `worker` since `beat` is too long. To be asked again and again."""
        silence, limit = now - beat.time, self.limit(beat.phase)
        if silence <= limit:
            return False
        if getattr(self._limits, beat.phase) is None:
            most = BUSY if "step" in self._longest else BUSY_BEFORE_FIRST_STEP
            if silence <= most * limit and self._may_compute(worker, now):
                return False
        # A restarted loop may only have been slow: it gets more time at the same place.
        self._measured(beat.phase, silence)
        return True

    def _may_compute(self, worker: Process, now: float) -> bool:
        """Whether `worker` used the processor in the last window, or too little is known yet."""
        used = worker.cpu_seconds()
        since, before = self._samples.setdefault(worker, (now, used))
        if now - since < WINDOW_S:
            return True
        self._samples[worker] = now, used
        return used - before >= BUSY_SHARE * (now - since)

    def _measured(self, phase: str, silence: float) -> None:
        self._longest[phase] = max(silence, self._longest.get(phase, 0.0))
