"""One stretch of a run computed again by its own program, in a directory of its own.

Invariant: the run that is replayed is only read. The program sees a copy of its working directory, with
a fork of the run in the place where it looks for it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.checkpoint.recipe import ALLOW
from perdure.drill.execution import LOGS, DrilledProgram, log_tail, writable
from perdure.drill.fault_injection import COPIES, PLAN, redirected
from perdure.drill.written_files import EVENTS
from perdure.errors import LaunchError
from perdure.store import LocalStorage, Run, fork_run
from perdure.store.drill_hook import DRILL
from perdure.store.format import span_text
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import read_journal
from perdure.supervise.attempts_log import RunHistory
from perdure.supervise.console import Console
from perdure.supervise.options import RunOptions
from perdure.supervise.supervisor import Observer, Supervisor

Part = tuple[str, int | None]
"""The name of a part of a step, and the number of its logical replica (for generators, process)."""


@dataclass(frozen=True)
class Stretch:
    """The steps after `start` up to `stop`; without a start, from a fresh state.

    The program also reports the parts of the step `traced`, if that is given.
    """

    start: int | None
    stop: int
    traced: int | None = None


@dataclass
class Recomputed:
    """What the program recorded and committed when it computed a stretch again.

    Attributes:
        entries: The lines of its journal after the start, by step.
        manifests: The checkpoints that it committed.
        recipe: The recipe that it gave its manager.
        last: The last step that it reported; None for none.
        parts: Digests of the leaves of each part of the traced step, by the name of the part and the
            number of the logical replica (`step_causes`).
    """

    entries: dict[int, JournalEntry] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    last: int | None = None
    parts: dict[Part, Mapping[str, str]] = field(default_factory=dict)


def recompute(
    program: DrilledProgram,
    run: Run,
    stretch: Stretch,
    directory: Path,
    devices: int | None = None,
    named: str | None = None,
) -> Recomputed:
    """Run `program` from the checkpoint of the start until it has computed the last step.

    Args:
        program: What to run.
        run: What is replayed.
        stretch: The steps.
        directory: Is created, and holds all that is written.
        devices: Devices of each worker; None leaves them to the framework.
        named: The run directory that the program opens; by default `run`. A fork of `run` is there.

    Raises:
        LaunchError: The program fails before the end of the stretch, or does not open the run.
        StoreError: The checkpoint cannot be read, or `directory` cannot be written to.
    """
    root = make_copy(program, directory)
    named = named or run.where
    named = named if "://" in named else os.path.realpath(named)
    name, place = redirected(directory, named)
    if stretch.start is not None:
        fork_run(run.storage, stretch.start, place)
    # The step itself is complete when the next one is reported. Only the chief writes the journal.
    fault = {"id": "end", "act": "exit", "worker": 0, "opened": named}
    fault |= {"point": "step", "step": stretch.stop + 1}
    plan = {"faults": [fault], "traced": stretch.traced}
    summary, events = run_copy(program, root, plan, devices)
    opened = [event["name"] for event in events if event["e"] == "open"]
    has_stopped = any(event["e"] == "fired" for event in events)
    if summary.status != 0 and not has_stopped:
        log = log_tail(directory / LOGS, summary.attempts) or "(nothing)"
        steps = span_text(1 if stretch.start is None else stretch.start + 1, stretch.stop)
        raise LaunchError(
            f"the program failed in the replay of {steps}: {why_it_failed(summary)}. The end of its "
            f"log:\n{log}"
        )
    if named not in opened:
        others = ", ".join(dict.fromkeys(opened)) or "no run directory"
        raise LaunchError(
            f"the program opened {others}, and not {named}, so that nothing was replayed. Start it in "
            f"the same directory and with the same arguments as the run, and name the run directory "
            f"that it uses."
        )
    return _recomputed(directory, name, place, events, stretch)


def make_copy(program: DrilledProgram, directory: Path) -> Path:
    """Create `directory` with a copy of the working directory; returns the root of the copy."""
    with writable(directory):
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise LaunchError(
                f"{directory}: it holds an earlier replay. Name another place with --directory, or "
                f"remove that one."
            ) from error
        return program.working.make(directory)


def run_copy(
    program: DrilledProgram, root: Path, plan: Mapping[str, Any], devices: int | None
) -> tuple[RunHistory, list[dict[str, Any]]]:
    """Run `program` once, without a restart, in the copy below `root`.

    Args:
        program: What to run.
        root: What `make_copy` returned.
        plan: What the fault injector has to do, besides what is in every plan.
        devices: Devices of each worker; None leaves them to the framework.

    Returns:
        How it ended, and the events of its processes.
    """
    directory = root.parent
    plan = {"attempt": 1, "read_only": program.read_only, **plan}
    (directory / PLAN).write_text(json.dumps(plan))
    options = RunOptions(
        workers=program.workers,
        devices_per_worker=devices,
        max_restarts=0,
        log_directory=directory / LOGS,
        compilation_cache=program.cache,
    )
    quiet = Console(io.StringIO(), io.StringIO())
    variables = {**program.environment, DRILL: str(directory)}
    command = program.working.command(root, program.command)
    summary = Supervisor(command, options, console=quiet, observer=_Environment(variables)).run()
    if summary.signal is not None:
        raise KeyboardInterrupt
    path = directory / EVENTS
    lines = path.read_bytes().splitlines() if path.exists() else []
    return summary, [json.loads(line) for line in lines]


def why_it_failed(summary: RunHistory) -> str:
    """How the only attempt ended; advice on restarts is of no use here."""
    return summary.attempts[-1].explanation if summary.attempts else summary.reason


def allow_other_recipe(run: Run, step: int | None) -> dict[str, str]:
    """Variables that let the program continue from a checkpoint of another recipe.

    Whether that gives the same bits is what the replay finds out.
    """
    fields = run.manifest(step).recipe.keys() if step is not None else ()
    stated = os.environ.get(ALLOW, "")
    return {ALLOW: ",".join([*filter(None, [stated]), *fields])}


def _recomputed(
    directory: Path, name: str, place: str, events: list[dict[str, Any]], stretch: Stretch
) -> Recomputed:
    found = Recomputed()
    start = -1 if stretch.start is None else stretch.start
    for entry in read_journal(LocalStorage(place)):
        if start < entry.step <= stretch.stop:
            found.entries[entry.step] = entry
    for event in events:
        kind = event["e"]
        if kind == "commit" and event["run"] == name and start < event["step"] <= stretch.stop:
            step: int = event["step"]
            copy = directory / COPIES / event["copy"]
            found.manifests[step] = decode_manifest(copy.read_bytes(), str(copy), step)
        elif kind == "recipe" and event["run"] == name:
            found.recipe = event["recipe"]
        elif kind == "step":
            found.last = max(event["step"], found.last or 0)
    found.parts = _parts(events)
    return found


def _parts(events: list[dict[str, Any]]) -> dict[Part, Mapping[str, str]]:
    """The parts of the traced step. Of what belongs to no replica, those of the chief."""
    parts: dict[Part, Mapping[str, str]] = {}
    traced = [event for event in events if event["e"] == "trace"]
    for event in sorted(traced, key=lambda event: not event["is_after"]):
        if event["w"] == 0 or "number" in event:
            parts.setdefault((event["part"], event.get("number")), event["leaves"])
    return parts


class _Environment(Observer):
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def environment(self, attempt: int, worker: int) -> Mapping[str, str]:
        return self._variables
