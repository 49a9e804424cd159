"""Runs of the programs in audit_programs/, for the proof of the journal, replay and bisect."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from perdure.drill.replay import ReplayOptions, StretchResult, replay_run
from perdure.drill.step_bisect import BisectOptions, StepBisected, bisect_step
from perdure.look.journal_bisect import Bisected, bisect_runs
from perdure.store import LocalStorage
from perdure.store.run_events import JournalEntry, first_difference
from perdure.store.run_log import read_journal
from report import Row

PROGRAMS = Path(__file__).absolute().parent / "audit_programs"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "PJRT_NPROC": "8"}

TOPOLOGIES: Mapping[str, dict[str, int]] = {
    "1 device": {"devices": 1},
    "2 devices": {"devices": 2},
    "3 devices": {"devices": 3},
    "4 devices": {"devices": 4},
    "2 processes": {"workers": 2, "devices": 1},
}


def command(program: str, *arguments: str) -> list[str]:
    """A program of audit_programs/ with its arguments."""
    return [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments]


def in_directory(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows whose programs run in a working directory of their own; each is returned outside of it."""
    with tempfile.TemporaryDirectory(prefix="perdure-audit-") as where:
        while True:
            with chdir(where):
                line = next(rows, None)
            if line is None:
                return
            yield line


def run(line: Sequence[str], devices: int = 1) -> tuple[int, str]:
    """Run a program to its end; returns the status and the standard error."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    ended = subprocess.run(
        line, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    return ended.returncode, ended.stderr


def run_to_end(line: Sequence[str], devices: int = 1) -> None:
    """Run a program that has to succeed."""
    status, errors = run(line, devices)
    if status != 0:
        raise RuntimeError(f"{' '.join(line)}: status {status}\n{errors[-3000:]}")


def replayed(name: str, line: Sequence[str], **options: Any) -> StretchResult:
    """The replay of runs/NAME, as one stretch."""
    with tempfile.TemporaryDirectory(prefix="perdure-audit-") as work:
        (result,) = replay_run(
            line, f"runs/{name}", ReplayOptions(**options), Path(work) / "replay"
        )
    return result


def bisected(
    one: str, two: str, line: Sequence[str], line2: Sequence[str] | None = None
) -> tuple[Bisected, StepBisected]:
    """What `perdure bisect runs/ONE runs/TWO` finds, first in the journals and then by replays."""
    runs = f"runs/{one}", f"runs/{two}"
    found = bisect_runs(*runs)
    if found.step is None:
        raise RuntimeError(f"{runs[0]} and {runs[1]} do not part")
    options = BisectOptions(tuple(line), None if line2 is None else tuple(line2))
    with tempfile.TemporaryDirectory(prefix="perdure-audit-") as work:
        return found, bisect_step(runs, found.step, found.last_equal, options, Path(work))


def journal(name: str | Path) -> list[JournalEntry]:
    """The lines of runs/NAME, or of the run directory with this absolute path."""
    return [*read_journal(LocalStorage(Path("runs") / name))]


def is_alike(one: Sequence[JournalEntry], two: Sequence[JournalEntry]) -> bool:
    """Whether two journals have the same lines, but for attempt and topology.

    A total that only one line has is not compared: on JAX it depends on the topology whether a step
    runs as one program, in which there is no total.
    """
    return len(one) == len(two) and all(
        (a.step, a.metrics) == (b.step, b.metrics) and first_difference(a, b) is None
        for a, b in zip(one, two, strict=True)
    )


def differing(engine: str, what: str) -> str:
    """What differs in a journal: a step of JAX that is one program has no total."""
    return "state" if engine == "jax" and what == "total" else what
