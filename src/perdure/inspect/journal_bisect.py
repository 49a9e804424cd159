"""`bisect_runs`: the first step at which two runs part, by a binary search in their journals.

A few lines of each journal are read, however long it is. The search takes for granted that states that
differ once differ at every later step.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import msgspec

from perdure.errors import ArgumentError, CorruptionError, UnreachableError
from perdure.store import LocalStorage, Run
from perdure.store.journal_file import JOURNAL, JournalEntry, first_difference


@dataclass(frozen=True)
class Bisected:
    """Where two runs part.

    Attributes:
        compared: "journals", or "checkpoints" if one of the runs has no journal.
        last_equal: The last step that both have before the difference, with the same bits.
        step: The first step that both have and that differs; None if none does.
        what: What differs there, as in `JournalMismatchError`.
        values: The digests (or fingerprints) of the two runs.
    """

    compared: str
    last_equal: int | None
    step: int | None = None
    what: str = ""
    values: tuple[str, str] = ("", "")


class _Line(Protocol):
    """Steps of a run in their order, with something to compare for each."""

    def at_or_after(self, step: int) -> JournalEntry | None: ...


def bisect_runs(one: str | os.PathLike[str], two: str | os.PathLike[str]) -> Bisected:
    """Find the first step at which two runs part. Nothing is changed.

    Args:
        one: A run directory.
        two: Another one.

    Raises:
        NotARunError: One of them is no run directory.
        ArgumentError: They have no step in common.
        CorruptionError: A line or manifest that is looked at is damaged.
    """
    runs = (Run(one), Run(two))
    with ExitStack() as stack:
        lines: list[_Line] = []
        for run in runs:
            if isinstance(run.storage, LocalStorage):
                path = run.storage.path(JOURNAL)
                if os.path.exists(path) and os.path.getsize(path):
                    lines.append(stack.enter_context(_Journal(path)))
        compared = "journals"
        if len(lines) < 2:
            compared = "checkpoints"
            lines = list[_Line](_CheckpointLines(run) for run in runs)
        return _search(compared, lines[0], lines[1], f"{runs[0].where} and {runs[1].where}")


def _search(compared: str, one: _Line, two: _Line, names: str) -> Bisected:
    """Invariant: the common steps below `low` are equal; `found` is the first known difference."""
    if (common := _common(one, two, 0)) is None:
        raise ArgumentError(f"{names}: expected a step that both have recorded, found none.")
    low, high = common[0].step, _end(one, two)
    last_equal: int | None = None
    found: tuple[JournalEntry, JournalEntry] | None = None
    while low < high:
        middle = (low + high) // 2
        common = _common(one, two, middle)
        if common is None or common[0].step >= high:
            high = middle
        elif first_difference(*common) is None:
            last_equal, low = common[0].step, common[0].step + 1
        else:
            found, high = common, middle
    if found is None:
        return Bisected(compared, last_equal)
    what, *values = first_difference(*found) or ("state", "", "")
    return Bisected(compared, last_equal, found[0].step, what, (values[0], values[1]))


def _end(one: _Line, two: _Line) -> int:
    """A number above every step that either has."""
    end = 1
    while one.at_or_after(end) is not None or two.at_or_after(end) is not None:
        end *= 2
    return end


def _common(one: _Line, two: _Line, step: int) -> tuple[JournalEntry, JournalEntry] | None:
    """The first step from `step` on that both have."""
    while (a := one.at_or_after(step)) is not None and (b := two.at_or_after(step)) is not None:
        if a.step == b.step:
            return a, b
        step = max(a.step, b.step)
    return None


class _CheckpointLines:
    """The fingerprints of a run's checkpoints as lines of states."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = run.steps()
        self._known: Mapping[int, str] = {}

    def at_or_after(self, step: int) -> JournalEntry | None:
        place = bisect.bisect_left(self._steps, step)
        if place == len(self._steps):
            return None
        found = self._steps[place]
        if found not in self._known:
            self._known = {**self._known, found: self._run.manifest(found).fingerprint}
        return JournalEntry(step=found, state=self._known[found], attempt=1)


class _Journal:
    """A journal file, of which only the lines that are asked for are read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._decode = msgspec.json.Decoder(JournalEntry).decode

    def __enter__(self) -> _Journal:
        try:
            with open(self._path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UnreachableError(
                f"{self._path}: the journal cannot be read: {error}. Correct the cause, then try again."
            ) from error
        self._end = self._data.rfind(b"\n") + 1  # without an incomplete last line
        return self

    def __exit__(self, *exc: object) -> None:
        self._data.close()

    def at_or_after(self, step: int) -> JournalEntry | None:
        low, high = 0, self._end  # a line that begins before `low` has a lower step
        found: JournalEntry | None = None
        while low < high:
            start = self._data.rfind(b"\n", 0, (low + high) // 2) + 1
            stop = self._data.find(b"\n", start) + 1
            entry = self._entry(start, stop)
            if entry.step < step:
                low = stop
            else:
                found, high = entry, start
        return found

    def _entry(self, start: int, stop: int) -> JournalEntry:
        try:
            return self._decode(self._data[start:stop])
        except (ValueError, RecursionError) as error:
            raise CorruptionError(
                f"{self._path}: the line at byte {start} is no line of a journal: {error}. `perdure "
                f"verify` checks the whole journal."
            ) from None
