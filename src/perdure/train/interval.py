"""When to save by the clock: after a fixed time, or after the time that loses the least.

The latter follows J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974, and J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from perdure.checkpoint.arguments import require_number

FIRST_S = 10.0  # until the first save, whose cost is not known yet
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
        mean = self.mean_time_between_failures
        require_number("mean_time_between_failures", mean, lambda s: s > 0, "more than 0 seconds")
        expected = "more than 0 and at most 1"
        require_number("max_overhead", self.max_overhead, lambda part: 0 < part <= 1, expected)


def optimum_interval(cost: float, mean_time_between_failures: float) -> float:
    """Seconds between two saves that lose the least time (Daly 2006), if a save costs `cost` seconds.

    sqrt(2 d M) (1 + sqrt(d/2M) / 3 + (d/2M) / 9) - d for d < 2 M, else M. Its first term is Young's.
    """
    if cost >= 2 * mean_time_between_failures:
        return mean_time_between_failures
    ratio = cost / (2 * mean_time_between_failures)
    first = math.sqrt(2 * cost * mean_time_between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class SaveTimer:
    """Says when the time for a save has come: after fixed seconds, or as `AutoInterval` asks.

    The cost of a save is its stall, and what steps take meanwhile above the median of the others.
    """

    def __init__(self, every: float | AutoInterval, now: float) -> None:
        self._every = every
        self._last = now
        self._idle: deque[float] = deque(maxlen=_RECENT)
        self._busy: list[float] = []
        self._stall: float | None = None
        self._costs: deque[float] = deque(maxlen=_SAVES)

    @property
    def is_measuring(self) -> bool:
        return isinstance(self._every, AutoInterval)

    @property
    def seconds(self) -> float:
        """The interval now: the optimum, or more if that would cost more than is allowed."""
        auto = self._every
        if not isinstance(auto, AutoInterval):
            return auto
        if not self._costs:
            return min(FIRST_S, auto.mean_time_between_failures / 10)
        cost = median(self._costs)  # of the last saves
        best = optimum_interval(cost, auto.mean_time_between_failures)
        return max(best, cost / auto.max_overhead)

    def due(self, now: float) -> bool:
        return now - self._last >= self.seconds

    def saved(self, now: float, stall: float) -> None:
        self._last = now
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
        if self._stall is not None:
            usual = median(self._idle or self._busy or [0.0])
            slower = sum(seconds - usual for seconds in self._busy)
            self._costs.append(self._stall + max(0.0, slower))
            self._stall, self._busy = None, []
