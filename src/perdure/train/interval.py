"""When to save by the clock: after a fixed time, or after the time that loses the least.

The latter follows J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974, and J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from perdure.errors import TrainError

FIRST_S = 10.0
"""Seconds until the first save, whose cost is not known yet. If failures are expected more often than
every 100 seconds, it is a tenth of the time between them."""

_RECENT = 64
_SAVES = 5


@dataclass(frozen=True)
class AutoInterval:
    """Save so often that saves and work that has to be repeated cost the least time together.

    Args:
        mean_time_between_failures: Seconds; what you expect of the machines.
        max_overhead: The largest part of the time that saves may cost, whatever is optimal.
    """

    mean_time_between_failures: float = 4 * 3600.0
    max_overhead: float = 0.01

    def __post_init__(self) -> None:
        if not self.mean_time_between_failures > 0:
            raise TrainError(
                f"mean_time_between_failures: expected more than 0 seconds, found "
                f"{self.mean_time_between_failures}."
            )
        if not 0 < self.max_overhead <= 1:
            raise TrainError(
                f"max_overhead: expected more than 0 and at most 1, found {self.max_overhead}."
            )


def optimum_interval(cost: float, mean_time_between_failures: float) -> float:
    """Seconds between two saves that lose the least time (Daly 2006), if a save costs `cost` seconds.

    sqrt(2 d M) (1 + sqrt(d/2M) / 3 + (d/2M) / 9) - d for d < 2 M, else M. Its first term is Young's.
    """
    if cost >= 2 * mean_time_between_failures:
        return mean_time_between_failures
    ratio = cost / (2 * mean_time_between_failures)
    first = math.sqrt(2 * cost * mean_time_between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def interval(cost: float, auto: AutoInterval) -> float:
    """Seconds between two saves: the optimum, or more if that would cost more than is allowed."""
    return max(optimum_interval(cost, auto.mean_time_between_failures), cost / auto.max_overhead)


class SaveMeter:
    """Measures what a save costs the loop: the stall, and the slower steps while it is written.

    The second is the time of these steps above the median of the steps without a save.
    """

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_RECENT)
        self._busy: list[float] = []
        self._stall: float | None = None
        self._costs: deque[float] = deque(maxlen=_SAVES)

    @property
    def cost(self) -> float | None:
        """Seconds that a save costs the loop: the median of the last saves, None before the first."""
        return median(self._costs) if self._costs else None

    def saved(self, stall: float) -> None:
        """A save began, and stalled the loop for `stall` seconds."""
        self._conclude()
        self._stall = stall

    def step(self, seconds: float, busy: bool) -> None:
        """An execution took so long; `busy` if a save was being written meanwhile."""
        if busy:
            self._busy.append(seconds)
        else:
            self._conclude()
            self._idle.append(seconds)

    def _conclude(self) -> None:
        if self._stall is None:
            return
        usual = median(self._idle) if self._idle else median(self._busy or [0.0])
        self._costs.append(self._stall + max(0.0, _excess(self._busy, usual)))
        self._stall = None
        self._busy = []


def _excess(seconds: Iterable[float], usual: float) -> float:
    return sum(measured - usual for measured in seconds)


class Timer:
    """Decides when the time for a save has come: after fixed seconds, or as `AutoInterval` asks."""

    def __init__(self, every: float | AutoInterval, now: float) -> None:
        self.meter = SaveMeter() if isinstance(every, AutoInterval) else None
        self._every = every
        self._last = now

    @property
    def seconds(self) -> float:
        """The interval now."""
        if not isinstance(self._every, AutoInterval):
            return self._every
        cost = self.meter.cost if self.meter else None
        first = min(FIRST_S, self._every.mean_time_between_failures / 10)
        return first if cost is None else interval(cost, self._every)

    def due(self, now: float) -> bool:
        """Whether the interval since the last save has passed."""
        return now - self._last >= self.seconds

    def saved(self, now: float) -> None:
        """A save was made; the interval starts again."""
        self._last = now
