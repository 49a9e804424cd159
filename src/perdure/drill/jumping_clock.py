"""Inside a drilled program: a clock that jumps, or one that only counts how often it is read."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from typing import Any


class _Clock:
    """By how many seconds the clock of the process has jumped."""

    offset = 0.0
    installed = False


def jump(seconds: float) -> bool:
    """Let the clock of the program jump; returns False if it cannot, because nothing is installed."""
    _Clock.offset += seconds
    return _Clock.installed


def install_jumps() -> None:
    """Replace the clock of the process by one that can jump."""
    real, real_ns = time.time, time.time_ns
    _Clock.installed = True
    _replace_clock(
        lambda: real() + _Clock.offset, lambda: real_ns() + int(_Clock.offset * 1_000_000_000)
    )


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
    _replace_clock(lambda: start + ticks() / 1000, lambda: start * 10**9 + ticks() * 10**6)


def _replace_clock(now: Callable[[], float], now_ns: Callable[[], int]) -> None:
    time.time, time.time_ns = now, now_ns
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _with_now(getattr(time, name)))
    text, local = time.strftime, time.localtime
    time.strftime = lambda form, *when: text(form, *(when or (local(),)))

    class Replaced(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Replaced:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Replaced:
            return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Replaced:
            return cls.fromtimestamp(time.time())

    class ReplacedDate(dt.date):
        @classmethod
        def today(cls) -> ReplacedDate:
            return cls.fromtimestamp(time.time())

    dt.datetime = Replaced  # type: ignore[misc]
    dt.date = ReplacedDate  # type: ignore[misc]


def _with_now(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda when=None: function(time.time() if when is None else when)
