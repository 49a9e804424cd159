"""`GracePeriod`: the time between the notice of a preemption and the end of the process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class GracePeriod:
    """Reports on standard error when a save does not fit into the period, or comes too late.

    Args:
        seconds: How long the period is; None if nobody knows, and then nothing is reported.
        describe: Gives a sentence on what has been saved so far.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        seconds: float | None = None,
        describe: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._describe = describe
        self._clock = clock
        self._since: float | None = None
        self._save_seconds: float | None = None
        self._reported = False

    def begin(self) -> None:
        """The notice has come."""
        self._since = self._clock()

    def end(self) -> None:
        """Report nothing more: the state is saved."""
        self._reported = True

    def seconds_left(self) -> float | None:
        """Seconds until the end that was announced; None before a notice or if nobody knows."""
        if self._since is None or self.seconds is None:
            return None
        return self._since + self.seconds - self._clock()

    def timed(self, save: Callable[[], None]) -> Callable[[], None]:
        """`save`, which also measures how long it takes: the next one is expected to take as long."""

        def measured() -> None:
            start = self._clock()
            save()
            self._save_seconds = self._clock() - start

        return measured

    def before_saving(self, step: int) -> None:
        """Report if a save of `step` does not fit. It is tried all the same: a save that is cut off
        costs no checkpoint."""
        left, needed = self.seconds_left(), self._save_seconds
        if left is not None and needed is not None and needed > left:
            report(
                f"saving step {step} takes about {needed:.1f} s, and {max(left, 0.0):.1f} s of the "
                f"grace period of {self.seconds:g} s are left. {self._describe()}"
            )

    def check(self) -> None:
        """Report, once, that the period is over and the state is not saved."""
        left = self.seconds_left()
        if left is not None and left <= 0 and not self._reported:
            self._reported = True
            report(
                f"the grace period of {self.seconds:g} s is over, and the state is not saved yet. "
                f"{self._describe()}"
            )


def report(text: str) -> None:
    """Write to standard error now, from any thread; a warning could come too late or be an error."""
    sys.stderr.write(f"perdure: {text}\n")
    sys.stderr.flush()
