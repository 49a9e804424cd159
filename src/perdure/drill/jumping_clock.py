"""Inside a drilled program: clocks that jump, run faster, or only count how often they are read.

The timers change for the files of the program alone: perdure, queues and libraries wait as always.
"""

from __future__ import annotations

import datetime as dt
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

FASTER = 60
_TIMERS = ("monotonic", "perf_counter", "process_time", "thread_time")
_WALL = tuple(
    getattr(time, name) for name in ("CLOCK_REALTIME", "CLOCK_TAI") if hasattr(time, name)
)
_NS = 10**9


class _Clock:
    """By how many seconds the clock of the process has jumped, and its timers."""

    offset = 0.0
    passed = 0.0


def jump(seconds: float) -> None:
    """Let the clock of the program jump, and its timers forwards by as much, as after a pause."""
    _Clock.offset += seconds
    _Clock.passed += abs(seconds)


def install_jumps() -> None:
    """Replace the clock of the process by one that can jump."""
    real, real_ns = time.time, time.time_ns
    _replace_clock(lambda: real() + _Clock.offset, lambda: real_ns() + int(_Clock.offset * _NS))
    _replace_timers(lambda now: now + _Clock.passed)


def run_faster(took_effect: Callable[[], None]) -> None:
    """Let the timers of the program run `FASTER` times as fast."""

    def faster(now: float) -> float:
        took_effect()
        return now * FASTER

    _replace_timers(faster)


def _replace_timers(changed: Callable[[float], float]) -> None:
    """Give the program timers that are a function of the real ones, which it takes in seconds."""
    # Not above, because the fault injector needs `jump` alone.
    from perdure.state.program_code import is_program_file

    def replaced(real: Callable[..., Any], unit: int) -> Callable[..., Any]:
        def read(*clock: int) -> Any:
            if not is_program_file(sys._getframe(1).f_code.co_filename):
                return real(*clock)
            if clock and clock[0] in _WALL:
                return time.time() if unit == 1 else time.time_ns()
            value = changed(real(*clock) / unit)
            return value if unit == 1 else int(value * unit)

        return read

    for name in (*_TIMERS, "clock_gettime"):
        for full, unit in ((name, 1), (f"{name}_ns", _NS)):
            if hasattr(time, full):
                setattr(time, full, replaced(getattr(time, full), unit))


def count_time() -> None:
    """Give each thread a clock that advances by a millisecond whenever it is read."""
    reads = threading.local()

    def ticks() -> int:
        reads.count = getattr(reads, "count", 0) + 1
        return reads.count

    start = 1_700_000_000
    time.perf_counter = lambda: ticks() / 1000
    time.perf_counter_ns = lambda: ticks() * 10**6
    time.process_time = time.perf_counter
    _replace_timers(lambda _: ticks() / 1000)
    _replace_clock(lambda: start + ticks() / 1000, lambda: start * 10**9 + ticks() * 10**6)


def _replace_clock(now: Callable[[], float], now_ns: Callable[[], int]) -> None:
    time.time, time.time_ns = now, now_ns
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _with_now(getattr(time, name)))
    text, local = time.strftime, time.localtime
    time.strftime = lambda form, *when: text(form, *(when or (local(),)))

    real, real_date = dt.datetime, dt.date

    class Replaced(real, metaclass=_like(real)):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Replaced:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Replaced:
            return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Replaced:
            return cls.fromtimestamp(time.time())

    class ReplacedDate(real_date, metaclass=_like(real_date)):
        @classmethod
        def today(cls) -> ReplacedDate:
            return cls.fromtimestamp(time.time())

    class Module(ModuleType):
        """The module `datetime`, with the replaced classes for the program alone: compiled code of
        a library (pandas) takes them for those of C and ends the process."""

        datetime = _for_program(Replaced, real)
        date = _for_program(ReplacedDate, real_date)

    dt.__class__ = Module  # type: ignore[assignment]


def _like(real: type) -> type:
    """The metaclass of a subclass: each value of `real` counts as an instance."""
    check = {"__instancecheck__": lambda _, value: isinstance(value, real)}
    return type("Like", (type,), check)


def _for_program(replaced: type, real: type) -> Any:
    from perdure.state.program_code import is_program_file

    return property(
        lambda _: replaced if is_program_file(sys._getframe(1).f_code.co_filename) else real
    )


def _with_now(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda when=None: function(time.time() if when is None else when)
