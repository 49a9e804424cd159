"""`check_program`: runs a program's first steps twice, and compares all that it computed.

Invariant: the program runs in copies of the working directory; nothing of the original changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from perdure.doctor import Computed, ResultComparison, compare
from perdure.drill.execution import DrilledProgram, execute
from perdure.drill.scenario import Fault, Launch, Outcome
from perdure.errors import LaunchError
from perdure.supervise.options import checked_command

PROCESSES = 2
"""How often the program is started."""

Result = Computed | ResultComparison


@dataclass(frozen=True)
class ProgramOptions:
    """How a program is run: it is ended once it has saved or recorded `steps` states."""

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

    One that calls `strategy.step(grad, update)` is ended in its first step, after that was computed
    several times on every device. Raises LaunchError if it fails or computed nothing that can be
    compared.
    """
    checked_command(command, "perdure doctor --")
    # Without a shared compilation cache: the second process compiles again, and may choose otherwise.
    program = DrilledProgram.here(
        command, directory, options.workers, options.read_only, is_cached=False
    )
    end = Launch((Fault("recorded", "exit", nth=options.steps, worker=0),))
    results: list[Result] = []
    for number in range(1, PROCESSES + 1):
        progress(f"the program, started for the {('first', 'second')[number - 1]} time")
        own_directory = directory / f"process-{number}"
        try:
            outcome = execute(
                program,
                own_directory,
                [end],
                devices=options.devices,
                restarts=0,
                asked={"doctor": True},
            )
        except LaunchError as error:
            raise LaunchError(str(error).replace("with --directory", "with TMPDIR")) from error
        results += _results(outcome, options.steps, number)
    compared = compare(each for each in results if isinstance(each, Computed))
    problems = dict.fromkeys(each for each in results if isinstance(each, ResultComparison))
    return [*map(_in_all_processes, compared), *problems]


def _results(outcome: Outcome, steps: int, number: int) -> Iterator[Result]:
    """What the process `number` has computed: its first step, its states, or else its checkpoints."""
    events: dict[str, list[dict[str, Any]]] = {}
    for event in outcome.events:
        events.setdefault(event["e"], []).append(event)
    if outcome.problem and not events.keys() & {"checked", "fired"}:
        raise LaunchError(
            f"the program failed: {outcome.problem}. The end of its log:\n{outcome.log or '(nothing)'}"
        )
    if checked := events.get("checked"):
        for event in checked:
            worker = f"worker {event['w']}, " if event["w"] else ""
            for each in event["results"]:
                if "problem" in each:
                    yield ResultComparison("the first step", each["what"], problem=each["problem"])
                else:
                    device, leaves = worker + each["device"], each["leaves"]
                    yield Computed("the first step", each["what"], device, number, leaves)
    elif states := events.get("state"):
        for event in states:
            yield Computed(
                f"states of {_shown(event['run'])}",
                f"step {event['step']}",
                "",
                number,
                event["leaves"],
            )
        if "fired" not in events:  # no failure: fewer states were compared than asked for
            seen = len({event["step"] for event in states if event["step"] > 0})
            text = f"the program ended after {seen} of the {steps} steps that --steps asks for"
            group = f"states of {_shown(states[-1]['run'])}"
            yield ResultComparison(group, "the end", problem=text, is_refusal=True)
    elif outcome.commits:
        for commit in outcome.commits:
            leaves = {x.path: f"{x.dtype} {x.shape} {x.hashes()}" for x in commit.manifest().leaves}
            group = f"checkpoints of {_shown(commit.run)}"
            yield Computed(group, f"step {commit.step}", "", number, leaves)
    else:
        raise LaunchError(
            "the program ended, and nothing that it computed is known: expected a call of "
            "strategy.step(grad, update), or states that it saves or records with a CheckpointManager. "
            "Three lines make a loop resumable, and known here: see README.md."
        )


def _shown(run: str) -> str:
    """The path of a run directory, which the copies have as a quoted name."""
    path = unquote(run)
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def _in_all_processes(comparison: ResultComparison) -> ResultComparison:
    if comparison.processes == PROCESSES:
        return comparison
    text = f"expected in both runs of the program, found in {comparison.processes} of them"
    return replace(comparison, problem=text)
