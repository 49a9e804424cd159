"""`bisect_runs`: the first step at which two runs part, in their journals and their checkpoints.

Every line and every common checkpoint is read and checked: nothing damaged is believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from operator import attrgetter

from perdure.errors import ArgumentError, StepNotFoundError
from perdure.store import Run
from perdure.store.run_events import JournalEntry, first_difference
from perdure.store.run_log import line_references, read_journal


@dataclass(frozen=True)
class Bisected:
    """Where two runs part.

    `compared` says where the difference is, or what both have in common; `lines` and `checkpoints`
    count what is equal before it; `what` differs first at `step`, with these `values`.
    """

    compared: str
    lines: int
    checkpoints: int
    last_equal: int | None
    step: int | None = None
    what: str = ""
    values: tuple[str, str] = ("", "")


def bisect_runs(one: str | os.PathLike[str], two: str | os.PathLike[str]) -> Bisected:
    """Find the first step at which two runs part. Nothing is changed.

    Raises NotARunError, ArgumentError (no step in common), UnreachableError, or CorruptionError:
    something is damaged, lines are missing, or a journal is that of another run.
    """
    runs = Run(one), Run(two)
    (first, first_lines), (second, second_lines) = _recorded(runs[0]), _recorded(runs[1])
    saved = sorted(first.keys() & second.keys())
    prints = {step: (first[step], second[step]) for step in saved}
    parted = next((step for step in saved if len(set(prints[step])) == 2), None)
    by_line: tuple[str, str, str] | None = None
    lines, last_line = 0, -1
    for entries in _common(first_lines, second_lines):
        step = entries[0].step
        if parted is not None and step > parted:
            continue  # lines after the difference are only checked
        if (difference := first_difference(*entries)) is not None:
            parted, by_line = step, difference
        elif step != parted:
            lines, last_line = lines + 1, step
    equal = [step for step in saved if parted is None or step < parted]
    last_equal = max(last_line, equal[-1] if equal else -1)
    counts = lines, len(equal), None if last_equal < 0 else last_equal
    if by_line is not None:
        what, *values = by_line
        return Bisected("journals", *counts, parted, what, (values[0], values[1]))
    if parted is not None:
        return Bisected("checkpoints", *counts, parted, "state", prints[parted])
    compared = ["journals"] * (lines > 0) + ["checkpoints"] * (len(equal) > 0)
    if not compared:
        raise ArgumentError(
            f"{runs[0].where} and {runs[1].where}: expected a step that both have recorded or saved, "
            f"found none."
        )
    return Bisected(" and ".join(compared), *counts)


def _recorded(run: Run) -> tuple[dict[int, str], Iterator[JournalEntry]]:
    """The fingerprints of the checkpoints of a run by step, and the lines of its journal."""
    fingerprints, references = {}, {}
    # The checkpoints first: those of a running training refer to lines that are there.
    for step in run.steps():
        with suppress(StepNotFoundError):  # deleted meanwhile
            manifest = run.manifest(step)
            fingerprints[step] = manifest.fingerprint
            references |= line_references([manifest])
    return fingerprints, read_journal(run.storage, references)


def _common(
    one: Iterator[JournalEntry], two: Iterator[JournalEntry]
) -> Iterator[tuple[JournalEntry, JournalEntry]]:
    """The lines of the steps that both have. Reads both to their ends, which checks them."""
    step_of = attrgetter("step")
    for _, entries in groupby(merge(one, two, key=step_of), step_of):
        first, *others = entries
        if others:
            yield first, others[0]
