"""SIGTERM, or a cloud's notice, as a request to save and leave: a flag that the loop asks for.

Owns the signal from `install` to `remove`. Invariant: the handler sets the flag and nothing else, save
for the one place where the loop waits for data and says so; only the first notice counts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from perdure.errors import StoreError

if TYPE_CHECKING:
    from perdure.checkpoint.manager import CheckpointManager

EXIT_PREEMPTED = 75
"""Exit status of a run that saved and wants to be started again (EX_TEMPFAIL of sysexits.h)."""

POLL_S = 1.0
"""How often a termination watcher is asked, as in TensorFlow."""


@dataclass(frozen=True)
class TerminationConfig:
    """How a run learns that it has to go, and how it leaves; the names are TensorFlow's.

    `termination_watcher_fn` is asked once a second, on a thread of its own, and returns True once the
    cloud has announced the end; SIGTERM is listened to in any case. `exit_fn` is called once the
    state is saved, in place of leaving with status 75. `grace_period` is the time in seconds between
    the notice and the end of the process; the run saves at its next step all the same, and says so
    on standard error when a save does not fit.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None and not self.grace_period > 0:
            raise StoreError(
                f"grace_period: expected None or more than 0 seconds, found {self.grace_period}."
            )


class Interrupted(BaseException):
    """A notice came while the loop waited, where it had said that it may be interrupted.

    Not an `Exception`, so that a data source that retries after errors lets it through.
    """


class PreemptionFlag:
    """Remembers the first notice from `install` on; until then SIGTERM keeps its old meaning.

    Installing late is deliberate: a program that never asks must still be stopped by SIGTERM.
    """

    def __init__(
        self,
        config: TerminationConfig | None = None,
        describe: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or TerminationConfig()
        self.raised = False
        self.interruptible = False  # plain, because it is set twice in every step
        self.save_seconds: float | None = None
        # For a loop that may end without a word to us: whether this frame is below it.
        self.in_scope: Callable[[FrameType | None], bool] | None = None
        self._describe = describe
        self._clock = clock
        self._since = 0.0
        self._told = False
        self._pid = 0
        self._previous: Any = None
        self._installed = False
        self._watch: threading.Thread | None = None
        self._stop = threading.Event()

    def install(self) -> None:
        """Take over SIGTERM, and start to watch. May be called often; off the main thread it can
        only watch."""
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True
        needed = self.config.termination_watcher_fn or self.config.grace_period
        if needed and self._watch is None:
            self._stop = threading.Event()  # a watcher of before may still wait on its own
            self._watch = threading.Thread(target=self._watching, name="perdure-watch", daemon=True)
            self._watch.start()

    def remove(self) -> None:
        """Give the signal back to its former handler, and stop watching."""
        self._stop.set()
        self._watch = None
        if self._installed and threading.current_thread() is threading.main_thread():
            # getsignal gives None for a handler that was not set from Python, and nothing can set that
            # one again; ours must not stay: what it passes on would come back to it for ever.
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._installed = False

    def abandon(self) -> None:
        """`remove` for an owner that is gone, from any thread. A handler that was set after this one
        stays; a signal that still arrives here goes to the former handler."""
        self._stop.set()
        self.in_scope = lambda _frame: False
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            self.remove()

    def poll(self) -> None:
        """Ask the watcher once, and say it once when the grace period is over. The watching thread
        does this every second."""
        watcher = self.config.termination_watcher_fn
        if not self.raised and watcher is not None and watcher():
            self._note()
            if self._installed:
                # To the main thread itself, so that what it waits in returns.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        left = self.seconds_left()
        if left is not None and left <= 0 and not self._told:
            self._told = True
            _say(
                f"the grace period of {self.config.grace_period:g} s is over, and the state is not "
                f"saved yet. {self._describe()}"
            )

    def seconds_left(self) -> float | None:
        """Until the end that was announced; None before a notice, and without a grace period."""
        if not self.raised or self.config.grace_period is None:
            return None
        return self._since + self.config.grace_period - self._clock()

    def timed(self, save: Callable[[], None]) -> Callable[[], None]:
        """`save`, which remembers how long it took: that is what the next one is expected to take."""

        def measured() -> None:
            start = self._clock()
            save()
            self.save_seconds = self._clock() - start

        return measured

    def before_saving(self, step: int) -> None:
        """Say beforehand when a save does not fit in the grace period. It is tried all the same:
        a save that is cut off costs no checkpoint."""
        left, needed = self.seconds_left(), self.save_seconds
        if left is not None and needed is not None and needed > left:
            _say(
                f"saving step {step} takes about {needed:.1f} s, and {max(left, 0.0):.1f} s of the "
                f"grace period of {self.config.grace_period:g} s are left. {self._describe()}"
            )

    def leave(self) -> NoReturn:
        """End the process: `exit_fn`, or status 75. Later signals do not change the status."""
        self._told = True
        self._stop.set()
        if self._installed and threading.current_thread() is threading.main_thread():
            # Python puts back the default for handlers of its own while it shuts down, and then a
            # second SIGTERM would end a saved run with 143 in place of 75.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._installed = False
        if self.config.exit_fn is not None:
            self.config.exit_fn()
        raise SystemExit(EXIT_PREEMPTED)

    def _note(self) -> None:
        if not self.raised:
            self._since = self._clock()
            self.raised = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker: its parent ends it with SIGTERM, and it has nothing to save.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.in_scope is not None and not self.in_scope(frame):
            self.remove()
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._note()
        if self.interruptible:
            self.interruptible = False
            raise Interrupted

    def _watching(self) -> None:
        stop = self._stop
        failed = False
        while not stop.wait(POLL_S):
            try:
                self.poll()
            except Exception as error:  # noqa: BLE001 (a metadata server that is away ends no run)
                if not failed:
                    _say(f"termination_watcher_fn raised {error!r}; it will be asked again.")
                failed = True


class PreemptionCheckpointHandler:
    """Saves and leaves when the run is preempted, for hand-written loops.

    `save_checkpoint_if_preempted` after each step is all that a loop needs. The mechanism is the
    manager's own, so it must not be used beside `manager.reached_preemption`.
    """

    def __init__(
        self, manager: CheckpointManager, termination_config: TerminationConfig | None = None
    ) -> None:
        self._manager = manager
        manager.preemption.config = termination_config or TerminationConfig()

    def save_checkpoint_if_preempted(self, step: int, state: Any) -> None:
        """Go on, or save `state` as `step` and leave with `exit_fn` or status 75.

        `step` counts the finished ones. In a group every process calls this at the same steps: all
        of them leave once one has got the notice.
        """
        if self._manager.reached_preemption(step):
            self._manager.save_and_exit(step, state)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Take over SIGTERM at once, for what comes before the first step (compilation, loading);
        given back at the end of the block."""
        self._manager.preemption.install()
        try:
            yield
        finally:
            self._manager.preemption.remove()


def _say(text: str) -> None:
    # Not a warning: it must come out now, from any thread, and once a kill is near.
    sys.stderr.write(f"perdure: {text}\n")
    sys.stderr.flush()
