"""Replays in two runs the step at which they part, and compares it part by part.

Invariant: a run is called wrong only if two replays of it are equal to each other and not to what it
recorded. Both runs are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.drill.causes import Diagnosis, diagnosis
from perdure.drill.compare import LeafDifference
from perdure.drill.execution import DrilledProgram
from perdure.drill.replay import (
    Parts,
    Recomputed,
    Reference,
    Stretch,
    StretchResult,
    compare_stretch,
    differences,
    recompute,
)
from perdure.errors import LaunchError
from perdure.store import Run
from perdure.store.run_log import read_journal
from perdure.supervise.options import checked_command
from perdure.text import quoted

PARTS = {
    "generators": ("the random generators before the step", "random generator"),
    "draws": ("the random generators after the step", "other draws"),
    "before": ("the state before the step", "changed outside"),
    "batch": ("the batch", "other data"),
    "key": ("the random key", "other key"),
    "contribution": ("the contribution", "other gradient"),
    "total": ("the total of all replicas", "other sum"),
    "update": ("the state that the update returned", "other update"),
    "state": ("the state after the step", "other step"),
}
"""Each part of a step in words, and the cause if it is the first that differs, in the order of the
computation. What a program has of them depends on how it computes a step."""

_GENERATORS = ("generators", "draws")
_TOPOLOGY_PARTS = ("contribution", "total", "update", "state")


@dataclass(frozen=True)
class PartDifference:
    """The first part of a step that differs between two computations of it.

    `numbers` are the logical replicas that differ, of `of`; `leaves` the first one's differing leaves.
    """

    part: str
    number: int | None
    numbers: tuple[int, ...]
    of: int
    leaves: tuple[LeafDifference, ...]
    equal: tuple[str, ...]

    @property
    def name(self) -> str:
        """The part in words, with the logical replicas that differ."""
        text, _ = PARTS[self.part]
        if self.number is None or self.part in _GENERATORS:
            return text
        if len(self.numbers) == self.of and self.of > 1:
            return f"{text} of every logical replica"
        shown = ", ".join(map(str, self.numbers[:8])) + (", ..." if len(self.numbers) > 8 else "")
        many = "s" if len(self.numbers) > 1 else ""
        return f"{text} of logical replica{many} {shown}"


@dataclass(frozen=True)
class ReplayedRun:
    """One of the two runs, and what its replay has to do with what it recorded.

    `is_repeatable` is False if two replays differ; asked only if it is not reproduced.
    """

    run: str
    workers: int
    devices: int | None
    result: StretchResult
    is_repeatable: bool = True


@dataclass(frozen=True)
class BisectOptions:
    """How the two runs are replayed; None of workers or devices for as many as each run had.

    Without `command2`, `command` computed both, and then finds the second run in place of the
    first.
    """

    command: tuple[str, ...]
    command2: tuple[str, ...] | None = None
    workers: int | None = None
    devices: int | None = None
    read_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepBisected:
    """What the replays of the step gave; `wrong` are runs whose own program computes other bits."""

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

    The commands open `runs` under these names. `step` differs first of what both recorded,
    `last_equal` is the step before it. Raises CorruptionError (journal or checkpoint), LaunchError.
    """
    commands = options.command, options.command2 or options.command
    named = runs[0], runs[0] if options.command2 is None else runs[1]
    for command in commands:
        checked_command(command, "perdure bisect RUN1 RUN2 --")
    one, two = (
        _Side.of(
            runs[n], commands[n], named[n], step, last_equal, options, directory / f"run{n + 1}"
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
    if part is not None and part.part in _TOPOLOGY_PARTS and one.topology != two.topology:
        other = replace(two, topology=one.topology, directory=two.directory / "other")
        is_topology = first_different_part(parts[0], other.replay(step, progress).parts) is None
    cause = likely_cause(
        step,
        replayed,
        part,
        generators_that_differ(*parts),
        is_alike=parted is None and part is None,
        is_topology=is_topology,
        has_step_before=one.has(whole[0], step - 1) and two.has(whole[1], step - 1),
    )
    return StepBisected(step, replayed, part, _wrong(replayed), cause)


@dataclass(frozen=True)
class _Side:
    """One run, and how it is replayed: by its own program, or the other's, opening `named`."""

    run: Run
    is_own: bool
    named: str
    program: DrilledProgram
    reference: Reference
    last: int
    topology: tuple[int, int | None]
    directory: Path

    @staticmethod
    def of(
        name: str,
        command: Sequence[str],
        named: str,
        step: int,
        last_equal: int | None,
        options: BisectOptions,
        directory: Path,
    ) -> _Side:
        """The side of the run `name`."""
        run, directory = Run(name), directory.absolute()
        reference = Reference.of(run, last_equal or 0)
        program = DrilledProgram.here(command, directory.parent, read_only=options.read_only)
        # Without a line of the journal, the step counts as a step of one process.
        entry = reference.entries.get(step)
        known = entry.topology if entry is not None else {}
        processes, devices = known.get("processes"), known.get("devices")
        workers = processes if isinstance(processes, int) and processes > 0 else 1
        each = devices // workers if isinstance(devices, int) else None
        topology = options.workers or workers, options.devices or each
        return _Side(run, named == name, named, program, reference, step, topology, directory)

    def replay(self, step: int, progress: Callable[[str], None]) -> Recomputed:
        """Compute the steps up to `step`, and the parts of that one."""
        stretch = Stretch(self.reference.start, step, step)
        progress(f"{self.run.where}: {stretch.describe()}")
        program = replace(self.program, workers=self.topology[0])
        number = len([*self.directory.glob("replay-*")]) + 1
        directory = self.directory / f"replay-{number}"
        try:
            return recompute(program, self.run, stretch, directory, self.topology[1], self.named)
        except LaunchError as error:
            hint = "" if self.is_own else "\nIf it was started with another command: --command2."
            raise LaunchError(f"{self.run.where}, step {step}: {error}{hint}") from error

    def judged(self, found: Recomputed, progress: Callable[[str], None]) -> ReplayedRun:
        """What the replay says about the run; a second one shows whether it can be relied on."""
        stretch = Stretch(self.reference.start, self.last)
        result = compare_stretch(self.run, self.reference, stretch, found)
        is_repeatable = (
            result.verdict == "reproduced"
            or _first_parted(found, self.replay(self.last, progress)) is None
        )
        return ReplayedRun(self.run.where, *self.topology, result, is_repeatable)

    def has(self, found: Recomputed, step: int) -> bool:
        """Whether the bits of `step` are known in a replay."""
        return step in found.entries or step == (self.reference.start or 0)


def _first_parted(one: Recomputed, two: Recomputed) -> int | None:
    """The first step that two replays recorded or saved with other bits."""
    parted = differences(one.entries, one.manifests, two)
    return min((step for step, *_ in parted), default=None)


# ---------------------------------------------------------------- the likely cause


def _wrong(runs: Sequence[ReplayedRun]) -> tuple[str, ...]:
    """The runs that have other bits than their program computes, every time."""
    return tuple(
        each.run
        for each in runs
        if each.result.verdict == "differs" and each.result.what != "end" and each.is_repeatable
    )


def likely_cause(
    step: int,
    runs: tuple[ReplayedRun, ReplayedRun],
    part: PartDifference | None,
    generators: Sequence[str] = (),
    *,
    is_alike: bool = False,
    is_topology: bool = False,
    has_step_before: bool = True,
) -> Diagnosis:
    """The cause with its evidence. Only what all replays agree on is named.

    `generators` were drawn from in the step and differed before it; `is_alike`: the replays have
    the same bits, with `is_topology` once both run on the same devices and processes.
    """
    evidence = [line for each in runs for line in _run_evidence(each)]
    if not all(each.is_repeatable for each in runs):
        return diagnosis("not repeatable", *evidence)
    results = [each.result for each in runs]
    if any(result.verdict == "not comparable" or result.what == "end" for result in results):
        return diagnosis("other program", *evidence)
    if wrong := _wrong(runs):
        if is_alike:
            evidence.append("the replays of both runs have the same bits")
        cause = diagnosis("computed wrongly", *evidence)
        starts = [(each.run, each.result.start) for each in runs if each.run in wrong]
        back = [
            f"perdure rollback {quoted(run)}@{start}" for run, start in starts if start is not None
        ]
        advice = f" Continue from the checkpoint before this step: {'; '.join(back)}."
        return replace(cause, advice=cause.advice + advice) if back else cause
    if part is None:
        evidence.append("no part of the step that the program reports differs")
        return diagnosis("unknown", *evidence)
    if part.equal:
        evidence.append(f"equal in both: {', '.join(PARTS[name][0] for name in part.equal)}")
    if generators and part.part != "generators":
        names = ", ".join(generators)
        evidence.append(f"the random generators of the process differed before the step: {names}")
    if part.part == "before" and not has_step_before:
        evidence.append(
            f"the program does not report step {step - 1}: the runs may have parted earlier. "
            f"Call `manager.save` or `manager.journal.record` after every step"
        )
        return diagnosis("unknown", *evidence)
    if is_topology:
        evidence.append("on the same devices and processes both have the same bits")
        return diagnosis("topology", *evidence)
    if part.part == "batch" and (same := _same_batch(step, runs)) is not None:
        return diagnosis(same[0], *evidence, same[1])
    if part.part == "state" and "update" in part.equal:
        return diagnosis("changed outside", *evidence)
    return diagnosis(PARTS[part.part][1], *evidence)


def _run_evidence(each: ReplayedRun) -> list[str]:
    result = each.result
    if result.verdict == "reproduced":
        return [f"{each.run}: its program computes what it has recorded"]
    if not each.is_repeatable:
        return [f"{each.run}: two replays of it differ from each other"]
    lines = [f"{each.run}: recipe: {field}" for field in result.recipe]
    if result.what == "end":
        return [*lines, f"{each.run}: {result.found}"]
    leaves = ", ".join(leaf.path for leaf in result.leaves[:4])
    what = f"{result.what} (leaf {leaves})" if leaves else result.what
    digests = f"recorded {result.expected}, computed {result.found}"
    return [*lines, f"{each.run}: step {result.step} has another {what}: {digests}"]


def _same_batch(step: int, runs: Sequence[ReplayedRun]) -> tuple[str, str] | None:
    """The cause, and the text, if one run has in this step the batch of another step of the other."""
    names = [each.run for each in runs]
    batches = [
        {entry.step: entry.batch for entry in read_journal(Run(name).storage)} for name in names
    ]
    for this, other in ((0, 1), (1, 0)):
        batch = batches[this].get(step)
        same = [at for at, known in batches[other].items() if batch and known == batch]
        if same:
            here, there = names[this], names[other]
            text = f"the batch of step {step} in {here} is that of step {same[0]} in {there}"
            begins_again = same[0] == min(batches[other]) and same[0] < step
            return "data position" if begins_again else "other position", text
    return None


# ---------------------------------------------------------------- the parts of a step


def first_different_part(one: Parts, two: Parts) -> PartDifference | None:
    """The first part that both have and that differs; generators count only without a strategy."""
    has_keys = any(part == "key" for part, _ in one.keys() & two.keys())
    equal: list[str] = []
    for part in PARTS:
        if has_keys and part in _GENERATORS:
            continue
        if (found := _difference(part, one, two, tuple(equal))) is not None:
            return found
        if any(one[name, number] for name, number in one.keys() & two.keys() if name == part):
            equal.append(part)
    return None


def generators_that_differ(one: Parts, two: Parts) -> tuple[str, ...]:
    """The names of the generators from which both drew in the step, with different states."""
    found = _difference("generators", one, two, ())
    return () if found is None else tuple(leaf.path for leaf in found.leaves)


def _difference(part: str, one: Parts, two: Parts, equal: tuple[str, ...]) -> PartDifference | None:
    numbers = [number for name, number in one if name == part and (part, number) in two]
    different = [n for n in numbers if _leaves(part, one[part, n], two[part, n])]
    if not different:
        return None
    different.sort(key=lambda number: -1 if number is None else number)
    first = different[0]
    known = tuple(number for number in different if number is not None)
    leaves = _leaves(part, one[part, first], two[part, first])
    return PartDifference(part, first, known, len(numbers), leaves, equal)


def _leaves(
    part: str, one: Mapping[str, str], two: Mapping[str, str]
) -> tuple[LeafDifference, ...]:
    """The leaves that differ. Of generators only those count that both computations drew from."""
    paths = one.keys() & two.keys() if part == "generators" else one.keys() | two.keys()
    return tuple(
        LeafDifference(path, one.get(path, ""), two.get(path, ""))
        for path in sorted(paths)
        if one.get(path) != two.get(path)
    )
