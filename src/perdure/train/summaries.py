"""Turns what a step or an evaluation returns into numbers, and shows and writes them for people.

    RUN/metrics.jsonl                    {"step":100,"time":1700000000.0,"metrics":{"loss":0.5}}
    RUN/summaries/events.out.tfevents.*  one file for each start of the run, if TensorBoard is installed

A metric is a scalar, or a (sum, weight) pair whose value is sum / weight. Reading one waits for the
step that computes it, so this is done only if something is shown or written.

Invariant: after a resume at step s nothing that was written for a later step is left or shown. Only
process 0 writes, and only while it holds the lock of the run directory. The files are local, because an
object store cannot append: a run in a bucket has none unless a local directory is named for them.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from html import escape
from importlib import import_module
from io import BufferedWriter
from pathlib import Path
from typing import Any

import msgspec

from perdure.errors import missing_extra
from perdure.store.format import Metric
from perdure.store.manifest import plain_metrics

LINE_S = 10.0
NOTEBOOK_S = 1.0
METRICS = "metrics.jsonl"
SUMMARIES = "summaries"
_PREFIX = "events.out.tfevents."
PAIR = {"sum", "weight"}


def scalars(logs: Any) -> dict[str, float]:
    """Every number in `logs` (a mapping, a scalar named "loss", or None) by its path."""
    named = logs if isinstance(logs, Mapping) and logs.keys() != PAIR else {"loss": logs}
    numbers: dict[str, float] = {}
    for name, value in _walk(named, ""):
        total, weight = value if isinstance(value, tuple) else (value, None)
        number = _number(total)
        if number is not None:
            numbers[name] = number if weight is None else _mean(number, _number(weight) or 0.0)
    return numbers


class Means:
    """Means over the batches of an evaluation: sums and weights added up in the order of batches."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, sums: Mapping[str, Any]) -> None:
        for name, value in _walk(sums, ""):
            total, weight = value if isinstance(value, tuple) else (value, 1.0)
            number = _number(total)
            if number is not None:
                before = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = (before[0] + number, before[1] + (_number(weight) or 0.0))

    def result(self) -> dict[str, float]:
        return {name: _mean(*pair) for name, pair in self._totals.items()}


def _walk(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, child in value.items():
        name = f"{path}/{key}" if path else str(key)
        if isinstance(child, Mapping):
            if child.keys() == PAIR:
                yield name, (child["sum"], child["weight"])
            else:
                yield from _walk(child, name)
        elif isinstance(child, (tuple, list)):
            if len(child) == 2:
                yield name, tuple(child)
        elif child is not None:
            yield name, child


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, int, float)):
        return float(value)
    shape = getattr(value, "shape", None)
    if shape is None or any(size != 1 for size in shape):
        return None
    return float(value.item() if hasattr(value, "item") else value)


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else float("nan")


class Progress:
    """Shows step, metrics, steps per second, time left and the last checkpoint of a run.

    In a notebook each update replaces the one before, because a line for each would fill the page.

    Args:
        on: Whether to show anything.
        console: A text stream; None is standard error, and in a notebook an output of the cell.
        every: Show after every so many steps. None: every ten seconds, in a notebook every second.
    """

    def __init__(self, on: bool, console: Any = None, every: int | None = None) -> None:
        self._on = on
        self.in_notebook = on and console is None and _is_notebook()
        self._seconds = NOTEBOOK_S if self.in_notebook else LINE_S
        self._output: Any = None
        self._console: Any = sys.stderr if console is None else console
        self._every = every
        self._next = 0.0
        self._stop = 0.0
        self._from: tuple[float, int] = (0.0, 0)
        self._rate: float | None = None

    def begin(self, step: int, stop: float, now: float) -> None:
        """The run is at `step` and ends at `stop`, which is infinite if the data decide."""
        self._stop = stop
        self._from = (now, step)
        self._rate = None
        self._next = now + self._seconds

    def wants(self, now: float, at_multiple: Callable[[int], bool]) -> bool:
        """Whether to show something now; `at_multiple(n)` is True if a multiple of n was reached."""
        due = now >= self._next if self._every is None else at_multiple(self._every)
        return self._on and due

    def update(
        self, step: int, metrics: Mapping[str, float], saved: int | None, now: float
    ) -> None:
        seconds, steps = now - self._from[0], step - self._from[1]
        if seconds > 0 and steps > 0:
            self._rate = steps / seconds
            self._from = (now, step)
        self._next = now + self._seconds
        end = "" if self._stop == float("inf") else f"/{self._stop:.0f}"
        parts = [f"step {step}{end}"]
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        if self._rate is not None:
            parts.append(f"{self._rate:.3g} steps/s")
            if end:
                parts.append(f"left {timedelta(seconds=round((self._stop - step) / self._rate))}")
        if saved is not None:
            parts.append(f"saved {saved}")
        text = "  ".join(parts)
        if not self.in_notebook:
            self.say(text)
            return
        bar = f'<progress value="{step}" max="{self._stop:.0f}"></progress> ' if end else ""
        data = {"text/plain": text, "text/html": bar + escape(text)}
        if self._output is None:
            display = import_module("IPython.display").display
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)

    def say(self, text: str) -> None:
        if self._on:
            self._console.write(f"{text}\n")
            self._console.flush()


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython in a terminal has no kernel."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return hasattr(get_shell(), "kernel")


class SummaryRow(msgspec.Struct):
    """A line of `metrics.jsonl`. `time` is in seconds since 1970; metrics are as in a manifest."""

    step: int
    time: float
    metrics: dict[str, Metric]


class Summaries:
    """Writes scalars by step into a local directory (None: nothing), once it is opened."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        clock: Callable[[], float] = time.time,
        tensorboard: bool | None = None,
    ) -> None:
        self.directory = None if directory is None else Path(directory)
        self._clock = clock
        self._tensorboard = tensorboard
        self._rows: BufferedWriter | None = None
        self._events: _Events | None = None
        self.trackers: list[Callable[[int, Mapping[str, float]], None]] = []
        """Experiment trackers, which get the same rows."""

    def open(self, step: int) -> None:
        """Drop what was written for steps after `step`, and open the files; MissingExtraError."""
        if self.directory is None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        rows = self.directory / METRICS
        cut(rows, step)
        self._rows = rows.open("ab")
        wanted = self._tensorboard
        if wanted or (wanted is None and importlib.util.find_spec("tensorboard") is not None):
            file = _new_file(self.directory / SUMMARIES, self._clock())
            self._events = _Events(file, step + 1, self._clock())

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row and one point of each value. On return they survive the end of the process."""
        for tracker in self.trackers if values else ():
            tracker(step, values)
        if self._rows is None or not values:
            return
        now = self._clock()
        self._rows.write(msgspec.json.encode(SummaryRow(step, now, plain_metrics(values))) + b"\n")
        self._rows.flush()
        if self._events is not None:
            self._events.scalars(step, values, now)

    def close(self) -> None:
        for file in (self._rows, self._events):
            if file is not None:
                file.close()
        self._rows = self._events = None


class _Events:
    """A file of events. At its SessionLog START TensorBoard drops earlier points of later steps."""

    def __init__(self, file: BufferedWriter, step: int, now: float) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            file.close()
            raise missing_extra("tensorboard", error) from error
        # Any, because the classes of protocol buffers are made at their import.
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._records = RecordWriter(file)
        self._write(0, now, file_version="brain.Event:2")
        start = self._event.SessionLog.START
        self._write(step, now, session_log=self._event.SessionLog(status=start))

    def scalars(self, step: int, values: Mapping[str, float], now: float) -> None:
        points = [self._summary.Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
        self._write(step, now, summary=self._summary.Summary(value=points))

    def close(self) -> None:
        self._records.close()

    def _write(self, step: int, now: float, **body: Any) -> None:
        event = self._event.Event(step=step, wall_time=now, **body)
        self._records.write(event.SerializeToString())
        self._records.flush()


def read(path: str | os.PathLike[str]) -> list[SummaryRow]:
    return [row for _, row in _whole(Path(path).read_bytes())]


def cut(path: Path, step: int) -> None:
    """Truncate the file before the first row of a later step or the first incomplete line."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        data = file.read()
        end = 0
        for offset, row in _whole(data):
            if row.step > step:
                break
            end = offset
        if end < len(data):
            file.truncate(end)


def _whole(data: bytes) -> list[tuple[int, SummaryRow]]:
    """Each row with the offset of its end, up to the first incomplete line."""
    rows: list[tuple[int, SummaryRow]] = []
    offset = 0
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            row = msgspec.json.decode(line, type=SummaryRow)
        except msgspec.DecodeError:
            break
        offset += len(line)
        rows.append((offset, row))
    return rows


def _new_file(directory: Path, now: float) -> BufferedWriter:
    """A new file whose name sorts after the others: TensorBoard reads them in that order."""
    directory.mkdir(exist_ok=True)
    stamps = [int(now)]
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(ValueError):
            stamps.append(int(path.name.removeprefix(_PREFIX).split(".")[0]) + 1)
    name = f"{_PREFIX}{max(stamps):010d}.{socket.gethostname()}.{os.getpid()}"
    return (directory / name).open("xb")
