"""`PreemptionFlag`: SIGTERM, or a notice of the cloud, as a flag that the training loop asks for.

Invariant: the signal handler sets the flag and nothing else, except while the loop waits for data
in `interruptible`. A signal to a process group also kills the data workers; their end raises
nothing in the middle of a step once the notice has come.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TypeVar

from perdure.checkpoint.arguments import require_number

EXIT_PREEMPTED = 75
"""Exit status of a run that saved and wants to be started again (EX_TEMPFAIL of sysexits.h)."""

POLL_S = 1.0
"""Seconds between two questions to a termination watcher, as in TensorFlow."""

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""Signals that can ask for a save."""

NOTICE_WAIT_S = 0.2
"""Seconds for a signal to a whole group to arrive here, after it has killed a data worker."""

R = TypeVar("R")
InScope = Callable[[FrameType | None], bool]


@dataclass(frozen=True)
class TerminationConfig:
    """How a run learns that it will be ended, and how it exits; the names are TensorFlow's.

    Attributes:
        termination_watcher_fn: Asked once a second, on a thread of its own; returns True once the
            cloud has announced the end. SIGTERM counts in any case.
        exit_fn: Called once the state is saved, instead of exiting with status 75.
        grace_period: Seconds between the notice and the end of the process. The run saves at its
            next step all the same, and reports on standard error if the state is not saved by then.

    Raises:
        ArgumentError: `grace_period` is not above 0.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None

    def __post_init__(self) -> None:
        expected = "None or more than 0 seconds"
        require_number("grace_period", self.grace_period, lambda s: s > 0, expected)


class Interrupted(BaseException):
    """A notice came while the loop waited in `PreemptionFlag.interruptible`. Not an `Exception`, so
    that a data source that retries after errors lets it through."""


class PreemptionFlag:
    """Remembers the first notice from `install` on; before, SIGTERM stops the program."""

    def __init__(
        self,
        config: TerminationConfig | None = None,
        describe: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
        signals: Sequence[str] = ("SIGTERM",),
    ) -> None:
        self.config = config or TerminationConfig()
        """The watcher, the exit and the grace period. Assign to it before `install`."""
        self.raised = False
        """Whether a notice has come."""
        self._signals = [signal.Signals[name] for name in signals]
        self._describe, self._clock = describe, clock
        self._since: float | None = None  # the time of the notice
        self._reported = False
        self._interruptible = False
        self._in_scope: InScope | None = None
        self._previous: dict[int, Any] = {}  # the former handlers while ours are installed
        self._previous_child: Any = None
        self._pid = 0
        self._stop: threading.Event | None = None

    def notify(self) -> None:
        """Give notice, as SIGTERM does."""
        if not self.raised:
            self._since = self._clock()
            self.raised = True

    def seconds_left(self) -> float | None:
        """Seconds until the end that was announced; None before a notice or if nobody knows."""
        if self._since is None or self.config.grace_period is None:
            return None
        return self._since + self.config.grace_period - self._clock()

    def interruptible(self, wait: Callable[[], R]) -> R:
        """The result of `wait`; a notice before or during it raises `Interrupted`."""
        self._interruptible = True  # before the look at the flag, or a notice in between would wait
        try:
            if self.raised:
                raise Interrupted
            return wait()
        finally:
            self._interruptible = False

    def install(self, in_scope: InScope | None = None) -> None:
        """Take over the signals, and start to watch (off the main thread only that). May be called
        often.

        `in_scope` is for a loop that may end without calling perdure: whether the interrupted frame
        belongs to the loop. If not, a signal gets its old meaning back.
        """
        if in_scope is not None:
            self._in_scope = in_scope
        if _on_main_thread():
            if not self._previous:
                self._pid = os.getpid()
                self._previous = {n: signal.signal(n, self._on_signal) for n in self._signals}
            self._guard_children()
        needed = self.config.termination_watcher_fn or self.config.grace_period
        if needed and self._stop is None:
            self._stop = threading.Event()
            thread = threading.Thread(
                target=self._watch, args=(self._stop,), name="perdure-watch", daemon=True
            )
            thread.start()

    def remove(self) -> None:
        """Give the signals back to their former handlers, and stop watching."""
        self._stop_watching()
        if self._previous and _on_main_thread():
            for number, handler in self._previous.items():
                # getsignal gives None for a handler that was not set from Python, and nothing can set
                # that one again. Ours must not stay: it would pass the signal on to itself for ever.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._previous = {}
            if signal.getsignal(signal.SIGCHLD) == self._on_child:
                signal.signal(signal.SIGCHLD, self._previous_child)

    def abandon(self) -> None:
        """`remove` for an owner that is gone, from any thread. A handler that came later stays."""
        self._stop_watching()
        self._in_scope = lambda _frame: False
        if any(signal.getsignal(number) == self._on_signal for number in self._signals):
            self.remove()

    def poll(self) -> None:
        """Ask the watcher, as its thread does each second, and report a grace period that is over."""
        watcher = self.config.termination_watcher_fn
        if not self.raised and watcher is not None and watcher():
            self.notify()
            if self._previous:
                # To the main thread itself, so that the call in which it waits returns.
                signal.pthread_kill(threading.main_thread().ident or 0, self._signals[0])
        left = self.seconds_left()
        if left is not None and left <= 0 and not self._reported:
            self._reported = True
            report(
                f"the grace period of {self.config.grace_period:g} s is over, and the state is not "
                f"saved yet. {self._describe()}"
            )

    def exit_process(self) -> NoReturn:
        """End the process: `exit_fn`, or status 75. Later signals do not change the status."""
        self._reported = True  # the state is saved
        self._stop_watching()
        if self._previous and _on_main_thread():
            # Python puts back the default for handlers of its own while it shuts down, and then a
            # second SIGTERM would end a saved run with 143 in place of 75.
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)
            self._previous = {}
        if self.config.exit_fn is not None:
            self.config.exit_fn()
        raise SystemExit(EXIT_PREEMPTED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker has nothing to save. Its parent ends it with SIGTERM; any other signal
            # went to the whole group, and the parent still needs the worker to finish its step.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self._in_scope is not None and not self._in_scope(frame):
            self.remove()
            os.kill(os.getpid(), number)
            return
        former = self._previous.get(number)
        if number == signal.SIGINT and self.raised and callable(former):
            former(number, frame)  # whoever presses Ctrl-C twice does not want to wait for the save
            return
        self.notify()
        if self._interruptible:
            self._interruptible = False
            raise Interrupted

    def explains(self, error: BaseException | None) -> bool:
        """Whether `error` may be the end of a data worker that got the same signal as this process."""
        return self.raised and (
            isinstance(error, (BrokenExecutor, EOFError, BrokenPipeError, ConnectionResetError))
            or (isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"))
        )

    def _guard_children(self) -> None:
        """Put `_on_child` before a handler of SIGCHLD, such as the handler of PyTorch's DataLoader."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._on_child:
            self._previous_child = handler
            signal.signal(signal.SIGCHLD, self._on_child)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous_child(number, frame)
        except RuntimeError:
            # It would be raised anywhere in the step that is to be finished and saved.
            if not self.raised and os.getpid() == self._pid:
                time.sleep(NOTICE_WAIT_S)  # the handler of the notice runs meanwhile
            if not self.raised:
                raise

    def _stop_watching(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _watch(self, stop: threading.Event) -> None:
        failed = False
        while not stop.wait(POLL_S):
            try:
                self.poll()
            except Exception as error:  # noqa: BLE001 (a metadata server that is away ends no run)
                if not failed:
                    report(f"termination_watcher_fn raised {error!r}; it will be asked again.")
                failed = True


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def report(text: str) -> None:
    """Write to standard error now, from any thread; a warning could come too late or be an error."""
    sys.stderr.write(f"perdure: {text}\n")
    sys.stderr.flush()
