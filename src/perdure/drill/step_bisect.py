"""`bisect_step`: replays in two runs the step at which they part, and compares it part by part.

Invariant: a run is called wrong only if two replays of it are equal to each other and not to what it
recorded. Both runs are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from perdure.drill.causes import Diagnosis
from perdure.drill.execution import DrilledProgram, writable
from perdure.drill.replay import Reference, compare_stretch
from perdure.drill.step_causes import (
    PartDifference,
    ReplayedRun,
    StepComparison,
    first_different_part,
    generators_that_differ,
    likely_cause,
)
from perdure.drill.stretch import Recomputed, Stretch, allow_other_recipe, recompute
from perdure.errors import LaunchError
from perdure.store import Run
from perdure.store.run_events import JournalEntry, first_difference
from perdure.supervise.options import checked_command

_OF_TOPOLOGY = ("contribution", "total", "update", "state")


@dataclass(frozen=True)
class BisectOptions:
    """How the two runs are replayed.

    Attributes:
        command: The program of the first run and its arguments.
        command2: Those of the second one; None if `command` computed both, which then finds the second
            run in place of the first.
        workers: Processes of the group; None for as many as each run had.
        devices: Devices of each process; None for as many as each run had, if its journal has that.
        read_only: Run directories that the programs only read.
        environment: Variables on top of those of this process.
    """

    command: tuple[str, ...]
    command2: tuple[str, ...] | None = None
    workers: int | None = None
    devices: int | None = None
    read_only: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepBisected:
    """What the replays of the step gave.

    Attributes:
        step: The first step at which the replays part; if they do not, that of the runs.
        runs: Both runs.
        part: The first part of the step that differs between the replays; None for none.
        wrong: The runs whose own program computes other bits than they have.
        diagnosis: The likely cause.
    """

    step: int
    runs: tuple[ReplayedRun, ReplayedRun]
    part: PartDifference | None
    wrong: tuple[str, ...]
    diagnosis: Diagnosis


def bisect_step(
    runs: tuple[str, str],
    step: int,
    last_equal: int | None,
    options: BisectOptions,
    directory: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> StepBisected:
    """Replay `step` in both runs, and find the first part of it that differs.

    Args:
        runs: The run directories. The commands have to open them under these names.
        step: The first step that both recorded and that differs.
        last_equal: The last step before it that both recorded with the same bits; None for none.
        options: The programs, and where they run.
        directory: Holds the replays.
        progress: Is called at the beginning of each replay.

    Raises:
        CorruptionError: A journal was changed, or a checkpoint is damaged.
        LaunchError: A program cannot be started, fails, or does not open its run.
    """
    commands = options.command, options.command2 or options.command
    named = runs[0], runs[0] if options.command2 is None else runs[1]
    for command in commands:
        checked_command(command, "perdure bisect RUN1 RUN2 --")
    one, two = (
        _side(
            runs[n],
            commands[n],
            named[n],
            step,
            last_equal,
            options,
            directory / f"run{n + 1}",
        )
        for n in (0, 1)
    )
    whole = one.replay(step, progress), two.replay(step, progress)
    parts = whole[0].parts, whole[1].parts
    parted = _first_parted(*whole)
    if parted is not None and parted < step:  # neither run has recorded that step
        step = parted
        parts = one.replay(step, progress).parts, two.replay(step, progress).parts
    part = first_different_part(*parts)
    replayed = one.judged(whole[0], progress), two.judged(whole[1], progress)
    is_topology = False
    if part is not None and part.part in _OF_TOPOLOGY and one.topology != two.topology:
        other = replace(two, topology=one.topology, place=two.place / "other")
        is_topology = first_different_part(parts[0], other.replay(step, progress).parts) is None
    comparison = StepComparison(
        step,
        replayed,
        part,
        generators_that_differ(*parts),
        is_alike=parted is None and part is None,
        is_topology=is_topology,
        has_step_before=_has(whole[0], one, step - 1) and _has(whole[1], two, step - 1),
    )
    return StepBisected(step, replayed, part, comparison.wrong(), likely_cause(comparison))


@dataclass(frozen=True)
class _Side:
    """One run, and how it is replayed; `place` holds its replays.

    Without `is_own` the program is that of the other run.
    """

    run: Run
    is_own: bool
    named: str
    program: DrilledProgram
    reference: Reference
    last: int
    topology: tuple[int, int | None]
    place: Path

    def replay(self, step: int, progress: Callable[[str], None]) -> Recomputed:
        """Compute the steps up to `step`, and the parts of that one."""
        start = self.reference.start
        begin = "a fresh state" if start is None else f"the checkpoint of step {start}"
        progress(f"step {step} of {self.run.where}, from {begin}")
        with writable(self.place):
            self.place.mkdir(parents=True, exist_ok=True)
            number = len(list(self.place.iterdir()))
        program = replace(self.program, workers=self.topology[0])
        stretch = Stretch(start, step, step)
        place = self.place / f"replay-{number + 1}"
        try:
            return recompute(program, self.run, stretch, place, self.topology[1], self.named)
        except LaunchError as error:
            hint = "" if self.is_own else "\nIf it was started with another command: --command2."
            raise LaunchError(f"{self.run.where}, step {step}: {error}{hint}") from error

    def judged(self, found: Recomputed, progress: Callable[[str], None]) -> ReplayedRun:
        """What the replay says about the run; a second one shows whether it can be relied on."""
        stretch = Stretch(self.reference.start, self.last)
        result = compare_stretch(self.run, self.reference, stretch, found)
        is_repeatable = True
        if result.verdict != "reproduced":
            is_repeatable = _first_parted(found, self.replay(self.last, progress)) is None
        return ReplayedRun(self.run.where, *self.topology, result, is_repeatable)


def _side(
    name: str,
    command: Sequence[str],
    named: str,
    step: int,
    last_equal: int | None,
    options: BisectOptions,
    place: Path,
) -> _Side:
    run, place = Run(name), place.absolute()
    reference = Reference.of(run, last_equal or 0)
    workers, devices = _recorded_topology(reference.entries.get(step))
    environment = {**options.environment, **allow_other_recipe(run, reference.start)}
    program = DrilledProgram.here(
        command, place.parent, read_only=options.read_only, environment=environment
    )
    topology = options.workers or workers, options.devices or devices
    return _Side(run, named == name, named, program, reference, step, topology, place)


def _has(found: Recomputed, side: _Side, step: int) -> bool:
    """Whether the bits of `step` are known in a replay."""
    return step in found.entries or step == (side.reference.start or 0)


def _recorded_topology(entry: JournalEntry | None) -> tuple[int, int | None]:
    """The processes, and the devices of each, that computed a step; without a line, one process."""
    topology = entry.topology if entry is not None else {}
    processes, devices = topology.get("processes"), topology.get("devices")
    workers = processes if isinstance(processes, int) and processes > 0 else 1
    return workers, devices // workers if isinstance(devices, int) else None


def _first_parted(one: Recomputed, two: Recomputed) -> int | None:
    """The first step that two replays recorded or saved with other bits."""
    steps = [
        step
        for step in one.entries.keys() & two.entries.keys()
        if first_difference(one.entries[step], two.entries[step])
    ]
    steps += [
        step
        for step in one.manifests.keys() & two.manifests.keys()
        if one.manifests[step].fingerprint != two.manifests[step].fingerprint
    ]
    return min(steps, default=None)
