"""`check_program`: runs a program's first steps twice, and compares all that it computed.

Invariant: the program runs in copies of the working directory; nothing of the original changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from perdure.doctor import Computed, ResultComparison, compare
from perdure.drill.execution import LOGS, DrilledProgram, log_tail, read_manifest
from perdure.drill.fault_injection import COPIES
from perdure.drill.stretch import make_copy, run_copy, why_it_failed
from perdure.errors import LaunchError
from perdure.supervise.options import checked_command

PROCESSES = 2
"""How often the program is started."""


@dataclass(frozen=True)
class ProgramOptions:
    """How a program is run.

    Attributes:
        steps: It is ended once it has saved or recorded so many steps.
        workers: Processes of its group.
        devices: Devices of each; None leaves them to the framework.
        read_only: Run directories that the program only reads.
    """

    steps: int = 2
    workers: int = 1
    devices: int | None = None
    read_only: tuple[str, ...] = ()


def check_program(
    command: Sequence[str],
    options: ProgramOptions,
    directory: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ResultComparison]:
    """Run the first steps of a program twice from its beginning, and compare the bits.

    A program that calls `strategy.step(grad, update)` is ended in its first step, after contributions,
    sum and update were computed several times on every device. Another one is ended after
    `options.steps` recorded states, which are compared.

    Args:
        command: The program and its arguments.
        options: How it is run.
        directory: Holds the runs.
        progress: Is called at the beginning of each run.

    Raises:
        LaunchError: The program cannot be started, fails, or computed nothing that can be compared.
    """
    checked_command(command, "perdure doctor --")
    try:
        return _check(command, options, directory, progress)
    except LaunchError as error:
        raise LaunchError(str(error).replace("with --directory", "with TMPDIR")) from error


def _check(
    command: Sequence[str],
    options: ProgramOptions,
    directory: Path,
    progress: Callable[[str], None],
) -> list[ResultComparison]:
    # Without a shared compilation cache: the second process compiles again, and may choose otherwise.
    program = DrilledProgram.here(
        command, directory, options.workers, options.read_only, is_cached=False
    )
    computed: list[Computed] = []
    problems: list[ResultComparison] = []
    for number in range(1, PROCESSES + 1):
        progress(f"the program, started for the {('first', 'second')[number - 1]} time")
        place = directory / f"process-{number}"
        for result in _run(program, options, place, number):
            if isinstance(result, Computed):
                computed.append(result)
            elif result not in problems:
                problems.append(result)
    return [*map(_in_all_processes, compare(computed)), *problems]


def _run(
    program: DrilledProgram, options: ProgramOptions, directory: Path, number: int
) -> list[Computed | ResultComparison]:
    root = make_copy(program, directory)
    end = {"id": "end", "act": "exit", "worker": 0, "point": "recorded", "nth": options.steps}
    plan = {"faults": [end], "doctor": True}
    summary, events = run_copy(program, root, plan, options.devices)
    kinds = {event["e"] for event in events}
    if summary.status != 0 and not kinds & {"checked", "fired"}:
        raise LaunchError(
            f"the program failed: {why_it_failed(summary)}. The end of its log:\n"
            f"{log_tail(directory / LOGS, summary.attempts) or '(nothing)'}"
        )
    for kind, read in (("checked", _checked), ("state", _states), ("commit", _checkpoints)):
        if kind in kinds:
            found = [event for event in events if event["e"] == kind]
            results = [result for event in found for result in read(event, directory, number)]
            if kind == "state" and "fired" not in kinds:
                results.append(_early_end(found, options.steps))
            return results
    raise LaunchError(
        "the program ended, and nothing that it computed is known: expected a call of "
        "strategy.step(grad, update), or states that it saves or records with a CheckpointManager. "
        "Three lines make a loop resumable, and known here: see README.md."
    )


def _checked(event: dict[str, Any], _: Path, number: int) -> list[Computed | ResultComparison]:
    worker = f"worker {event['w']}, " if event["w"] else ""
    results: list[Computed | ResultComparison] = []
    for result in event["results"]:
        what = result["what"]
        if "problem" in result:
            results.append(ResultComparison(FIRST_STEP, what, problem=result["problem"]))
        else:
            device = worker + result["device"]
            results.append(Computed(FIRST_STEP, what, device, number, result["leaves"]))
    return results


def _states(event: dict[str, Any], _: Path, number: int) -> list[Computed | ResultComparison]:
    group = f"states of {_shown(event['run'])}"
    return [Computed(group, f"step {event['step']}", "", number, event["leaves"])]


def _early_end(states: list[dict[str, Any]], wanted: int) -> ResultComparison:
    """A row, and no failure: fewer states were compared than asked for."""
    seen = len({event["step"] for event in states if event["step"] > 0})
    text = f"the program ended after {seen} of the {wanted} steps that --steps asks for"
    group = f"states of {_shown(states[-1]['run'])}"
    return ResultComparison(group, "the end", problem=text, is_refusal=True)


def _checkpoints(
    event: dict[str, Any], directory: Path, number: int
) -> list[Computed | ResultComparison]:
    step = event["step"]
    manifest = read_manifest(str(directory / COPIES / event["copy"]), step)
    leaves = {leaf.path: f"{leaf.dtype} {leaf.shape} {leaf.hashes()}" for leaf in manifest.leaves}
    group = f"checkpoints of {_shown(event['run'])}"
    return [Computed(group, f"step {step}", "", number, leaves)]


def _shown(run: str) -> str:
    """The path of a run directory, which the copies have as a quoted name."""
    path = unquote(run)
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def _in_all_processes(comparison: ResultComparison) -> ResultComparison:
    if comparison.processes == PROCESSES:
        return comparison
    text = f"expected in both runs of the program, found in {comparison.processes} of them"
    return replace(comparison, problem=text)


FIRST_STEP = "the first step"
