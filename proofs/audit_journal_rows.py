"""A run that is killed and resumed on other devices has the journal of an undisturbed one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from audit_runs import command, in_directory, is_alike, journal, run, run_to_end

from perdure.drill.drill import run_drill
from perdure.drill.drill_report import DrillOptions
from report import Row, row

KILLS = (3, 7, 10)
DEVICES = (1, 3, 2, 4)


PROGRAMS: dict[str, tuple[list[str], Sequence[int]]] = {
    "a strategy on jax": (["strategy_step", "jax"], DEVICES),
    "a strategy on torch": (["strategy_step", "torch"], DEVICES),
    "a Trainer": (["trainer"], DEVICES),
    "a loop of numpy": (["plain_loop", "numpy"], (1, 1, 1, 1)),
    "a loop of torch": (["plain_loop", "torch"], (1, 1, 1, 1)),
}


def rows() -> Iterator[Row]:
    """One row for each program, and a control."""
    for name, (program, devices) in PROGRAMS.items():
        yield from in_directory(_killed(name, command(*program), devices))
    for backend in ("jax", "torch"):
        yield from in_directory(_fit(backend))
    yield from in_directory(_drilled())
    yield from in_directory(_control())


def _killed(name: str, line: list[str], devices: Sequence[int]) -> Iterator[Row]:
    run_to_end([*line, "run=whole"])
    whole, outcomes = journal("whole"), []
    for step, on in zip((*KILLS, 0), devices, strict=True):
        status, _ = run([*line, "run=killed", f"kill={step}"], on)
        found = journal("killed")
        outcomes.append(status == (-9 if step else 0))
        outcomes.append(is_alike(found, whole[: step or None]))
    yield row(f"journal, {name}: killed three times, on other devices each time", outcomes)


def _fit(backend: str) -> Iterator[Row]:
    os.environ["KERAS_BACKEND"] = backend
    line = command("keras_fit")
    run_to_end([*line, "run=whole"])
    outcomes = []
    for epoch in (1, 2, 0):
        status, _ = run([*line, "run=killed", f"kill_after_epoch={epoch}"])
        outcomes.append(status == (-9 if epoch else 0))
    outcomes.append(is_alike(journal("killed"), journal("whole")))
    yield row(f"journal, a Keras fit on {backend}: killed twice", outcomes)


def _drilled() -> Iterator[Row]:
    os.mkdir("kept")
    line = command("plain_loop", "numpy", f"keep={os.path.abspath('kept')}")
    report = run_drill(line, DrillOptions(runs=3), Path("drill").absolute()).document()
    kept = [journal(run) for run in Path("kept").absolute().glob("*/run")]
    # Two undisturbed runs, those under faults, and those that it resumes from older checkpoints.
    outcomes = [report["pass"], len(kept) >= 2 + len(report["runs"])]
    outcomes += [is_alike(found, kept[0]) for found in kept[1:]]
    outcomes.append(len({line.attempt for found in kept for line in found}) > 1)
    yield row("journal, a loop of numpy under `perdure drill`", outcomes)


def _control() -> Iterator[Row]:
    line = command("strategy_step", "jax")
    run_to_end([*line, "run=one"])
    run_to_end([*line, "run=two", "plant=update", "at=9"])
    lines = zip(journal("one"), journal("two"), strict=True)
    parted = [one.step for one, two in lines if not is_alike([one], [two])]
    yield row(
        "control: an error in step 9 changes the lines from 9 on", [parted == [9, 10, 11, 12, 13]]
    )
