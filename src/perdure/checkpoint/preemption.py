"""`PreemptionFlag`: SIGTERM, or a notice of the cloud, as a flag that the training loop asks for.

Invariant: the signal handler sets the flag and nothing else, except while the loop waits for data in
`interruptible`; only the first notice counts. A signal to a whole process group also kills the data
workers; their end raises nothing in the middle of a step once the notice has come.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TypeVar

from perdure.checkpoint.grace_period import GracePeriod, report
from perdure.errors import StoreError

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
        grace_period: Seconds between the notice and the end of the process. The run saves at its next
            step all the same, and reports on standard error if a save does not fit.

    Raises:
        StoreError: `grace_period` is not above 0.
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
    """A notice came while the loop waited in `PreemptionFlag.interruptible`.

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
        signals: Sequence[str] = ("SIGTERM",),
    ) -> None:
        self._signals = [signal.Signals[name] for name in signals]
        self.grace = GracePeriod(None, describe, clock)
        self.config = config or TerminationConfig()
        self._raised = False
        self._interruptible = False
        self._in_scope: InScope | None = None
        self._previous: dict[int, Any] = {}  # the former handlers while ours are installed
        self._previous_child: Any = None
        self._pid = 0
        self._stop: threading.Event | None = None

    @property
    def config(self) -> TerminationConfig:
        """The watcher, the exit and the grace period. Assign to it before `install`."""
        return self._config

    @config.setter
    def config(self, config: TerminationConfig) -> None:
        self._config = config
        self.grace.seconds = config.grace_period

    @property
    def raised(self) -> bool:
        """Whether a notice has come."""
        return self._raised

    def notify(self) -> None:
        """Give notice, as SIGTERM does."""
        if not self._raised:
            self.grace.begin()
            self._raised = True

    def interruptible(self, wait: Callable[[], R]) -> R:
        """The result of `wait`, which a notice ends.

        Raises:
            Interrupted: A notice came before or during `wait`.
        """
        self._interruptible = True  # before the look at the flag, or a notice in between would wait
        try:
            if self._raised:
                raise Interrupted
            return wait()
        finally:
            self._interruptible = False

    def install(self, in_scope: InScope | None = None) -> None:
        """Take over the signals, and start to watch. May be called often.

        Off the main thread it can only watch.

        Args:
            in_scope: For a loop that may end without calling perdure: says whether the frame that the
                signal interrupts belongs to the loop. If not, a signal gets its old meaning back.
        """
        if in_scope is not None:
            self._in_scope = in_scope
        if _on_main_thread():
            if not self._previous:
                self._pid = os.getpid()
                self._previous = {n: signal.signal(n, self._on_signal) for n in self._signals}
            self._guard_children()
        needed = self._config.termination_watcher_fn or self._config.grace_period
        if needed and self._stop is None:
            self._stop = threading.Event()
            thread = threading.Thread(
                target=self._watch, args=(self._stop,), name="perdure-watch", daemon=True
            )
            thread.start()

    def remove(self) -> None:
        """Give the signals back to their former handlers, and stop watching."""
        self._stop_watching()
        self._stop = None
        if self._previous and _on_main_thread():
            for number, handler in self._previous.items():
                # getsignal gives None for a handler that was not set from Python, and nothing can set
                # that one again. Ours must not stay: it would pass the signal on to itself for ever.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._previous = {}
            if signal.getsignal(signal.SIGCHLD) == self._on_child:
                signal.signal(signal.SIGCHLD, self._previous_child)

    def abandon(self) -> None:
        """`remove` for an owner that is gone, from any thread.

        A handler that was set after this one stays; a signal that still arrives here goes to the former
        handler.
        """
        self._stop_watching()
        self._in_scope = lambda _frame: False
        if any(signal.getsignal(number) == self._on_signal for number in self._signals):
            self.remove()

    def poll(self) -> None:
        """Ask the watcher once, and report once if the grace period is over.

        The watching thread calls this every second.
        """
        watcher = self._config.termination_watcher_fn
        if not self._raised and watcher is not None and watcher():
            self.notify()
            if self._previous:
                # To the main thread itself, so that the call in which it waits returns.
                signal.pthread_kill(threading.main_thread().ident or 0, self._signals[0])
        self.grace.check()

    def exit_process(self) -> NoReturn:
        """End the process: `exit_fn`, or status 75. Later signals do not change the status."""
        self.grace.end()
        self._stop_watching()
        if self._previous and _on_main_thread():
            # Python puts back the default for handlers of its own while it shuts down, and then a
            # second SIGTERM would end a saved run with 143 in place of 75.
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)
            self._previous = {}
        if self._config.exit_fn is not None:
            self._config.exit_fn()
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
        if number == signal.SIGINT and self._raised and callable(former):
            former(number, frame)  # whoever presses Ctrl-C twice does not want to wait for the save
            return
        self.notify()
        if self._interruptible:
            self._interruptible = False
            raise Interrupted

    def explains(self, error: BaseException | None) -> bool:
        """Whether `error` may be the end of a data worker that got the same signal as this process."""
        return self._raised and (
            isinstance(error, (BrokenExecutor, EOFError, BrokenPipeError, ConnectionResetError))
            or (isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"))
        )

    def _guard_children(self) -> None:
        """Put `_on_child` before a handler of SIGCHLD, such as that of PyTorch's DataLoader."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._on_child:
            self._previous_child = handler
            signal.signal(signal.SIGCHLD, self._on_child)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous_child(number, frame)
        except RuntimeError:
            # It would be raised anywhere in the step that is to be finished and saved.
            if not self._raised and os.getpid() == self._pid:
                time.sleep(NOTICE_WAIT_S)  # the handler of the notice runs meanwhile
            if not self._raised:
                raise

    def _stop_watching(self) -> None:
        if self._stop is not None:
            self._stop.set()

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
