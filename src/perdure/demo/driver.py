"""Runs the demo phase by phase with its faults, compares the results, and shows all of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from perdure.checkpoint.preemption import EXIT_PREEMPTED
from perdure.demo.phases import BATCH, Phase, plan
from perdure.errors import NotARunError, PerdureError
from perdure.store import Run
from perdure.supervise import WorkerGroup

# How each worker may end, by fault. When workers are killed one after another, one of them may see that
# another is lost before its own turn comes, and end by itself.
ENDS = {"": (0,), "SIGTERM": (EXIT_PREEMPTED,), "SIGKILL": (-9, 1)}
COLUMNS = ("phase", "topology", "steps", "ended", "resumed", "repeated", "fingerprint")


@dataclass(frozen=True)
class DemoOptions:
    """The options of `perdure demo`."""

    engine: str
    directory: Path
    data: str | None
    epochs: int
    seed: int
    without: str | None = None


class DemoReporter:
    """Prints to `console`; a quiet console prints nothing."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    @contextmanager
    def phase(self, title: str) -> Iterator[Any]:
        """Show a progress bar for one phase; yields the function that moves it to a step."""
        title_and_note = TextColumn("{task.description:<28}"), TextColumn("{task.fields[note]}")
        columns = title_and_note[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, title_and_note[1], console=self._console) as progress:
            task = progress.add_task(title, total=self._total, note="starting")
            yield lambda step, note="": progress.update(task, completed=step, note=note)

    def table(self, document: Mapping[str, Any]) -> None:
        """Print the phases as a table, then the verdict."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in COLUMNS:
            numeric = column in ("resumed", "repeated")
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
        for phase in document["phases"]:
            table.add_row(
                phase["phase"],
                phase["topology"],
                f"{phase['from']}-{phase['to']}",
                phase["ended"],
                "-" if phase["resumed_from"] is None else str(phase["resumed_from"]),
                str(phase["repeated"]),
                (phase["fingerprint"] or "-")[:12],
            )
        self._console.print(table)
        first, last = document["accuracy"]
        self._console.print(
            f"test accuracy {first:.2%} uninterrupted, {last:.2%} with faults, on "
            f"{document['test_examples']} digits; seed {document['seed']}"
        )
        if document["without"]:
            self._console.print(f"guard removed: {document['without']}")
        self._console.print(
            f"[bold]{'PASS' if document['pass'] else 'FAIL'}[/bold]: the final fingerprints are "
            f"{'equal' if document['pass'] else 'different'}"
        )


def run_demo(options: DemoOptions, examples: int, make_reporter: Any) -> dict[str, Any]:
    """Run every phase of the demo.

    Args:
        options: What to run, and where.
        examples: How many training examples there are.
        make_reporter: Makes the `DemoReporter` from the total number of steps.

    Returns:
        The document that `--json` prints.

    Raises:
        ClusterError: If a phase ends otherwise than planned; the error has the log of the worker.
    """
    steps_per_epoch = -(-examples // BATCH)
    total = steps_per_epoch * options.epochs
    reporter: DemoReporter = make_reporter(total)
    phases = plan(options.engine, total, steps_per_epoch, options.seed)
    results = [_run_phase(options, phase, total, reporter) for phase in phases]
    for before, after in pairwise(results[1:]):
        after["repeated"] = before["to"] - after["from"]
    ends = [_fingerprint(options.directory / run, total) for run in ("plain", "faulted")]
    finals = [result for result in results if "accuracy" in result]
    return {
        "engine": options.engine,
        "seed": options.seed,
        "without": options.without,
        "steps": total,
        "phases": [
            {k: v for k, v in r.items() if k not in ("accuracy", "examples")} for r in results
        ],
        "accuracy": [result["accuracy"] for result in finals],
        "test_examples": finals[-1]["examples"],
        "fingerprints": ends,
        "pass": ends[0] is not None and ends[0] == ends[1],
    }


def _run_phase(
    options: DemoOptions, phase: Phase, total: int, reporter: DemoReporter
) -> dict[str, Any]:
    directory = options.directory / phase.run
    before = _steps(directory)
    reached = before[-1] if before else 0
    start, done, waiting = 0, 0, bool(phase.fault)
    final: dict[str, Any] = {}
    with reporter.phase(f"{phase.name} on {phase.topology}") as show:
        group = WorkerGroup(_command(options, phase, total), phase.processes, _environment(phase))
        with _named(phase), group:
            for worker, event in group.events():
                if worker != 0:
                    continue
                if event["event"] == "start":
                    start = done = event["step"]
                elif event["event"] == "step":
                    done = event["step"]
                    show(done)
                    if waiting and done >= phase.stop and _may_hit(phase, directory, before):
                        waiting = False
                        show(done, phase.fault)
                        group.kill() if phase.fault == "SIGKILL" else group.terminate()
                elif event["event"] == "done":
                    final = {"accuracy": event["accuracy"], "examples": event["examples"]}
            ended = group.wait()
            group.require(ended, ENDS[phase.fault])
        show(done, ended.describe())
    return {
        "phase": phase.name,
        "topology": phase.topology,
        "from": start,
        "to": done,
        "fault": phase.fault or None,
        "ended": ended.describe(),
        "resumed_from": reached if before else None,
        "repeated": 0,
        "fingerprint": _fingerprint(directory, (_steps(directory) or [0])[-1]),
        **final,
    }


def _may_hit(phase: Phase, directory: Path, before: list[int]) -> bool:
    """Whether the fault may be sent: a kill waits for the first checkpoint of its phase."""
    return phase.fault != "SIGKILL" or _steps(directory) != before


def _command(options: DemoOptions, phase: Phase, total: int) -> list[str]:
    command = [sys.executable, "-m", f"perdure.demo.train_{options.engine}"]
    command += ["--run", str(options.directory / phase.run), "--steps", str(total)]
    command += ["--seed", str(options.seed), "--devices", str(phase.devices)]
    command += ["--data", options.data] if options.data else []
    return command + (["--without", options.without] if options.without else [])


def _environment(phase: Phase) -> dict[str, str]:
    # Without accelerators, JAX has one device per process unless it is asked for more.
    return {"JAX_NUM_CPU_DEVICES": str(phase.devices), "JAX_PLATFORMS": "cpu"}


def _steps(directory: Path) -> list[int]:
    try:
        return Run(directory).steps()
    except NotARunError:  # the first save makes the directory before it makes a run of it
        return []


def _fingerprint(directory: Path, step: int) -> str | None:
    return Run(directory).manifest(step).fingerprint if step in _steps(directory) else None


@contextmanager
def _named(phase: Phase) -> Iterator[None]:
    """Name the phase in errors."""
    try:
        yield
    except PerdureError as error:
        error.args = (f"phase {phase.name!r} on {phase.topology}: {error}",)
        raise
