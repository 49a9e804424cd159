"""The parts of a step that differs between two runs, and its likely cause, from their replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perdure.drill.causes import Diagnosis, diagnosis
from perdure.drill.compare import LeafDifference
from perdure.drill.replay import StretchResult
from perdure.drill.stretch import Part
from perdure.store import Run
from perdure.store.run_log import read_journal

Parts = Mapping[Part, Mapping[str, str]]
"""Digests of the leaves of each part of one step."""

PARTS = {
    "generators": "the random generators before the step",
    "draws": "the random generators after the step",
    "before": "the state before the step",
    "batch": "the batch",
    "key": "the random key",
    "contribution": "the contribution",
    "total": "the total of all replicas",
    "update": "the state that the update returned",
    "state": "the state after the step",
}
"""In the order of the computation. What a program has of them depends on how it computes a step."""

_CAUSES = {
    "generators": "random generator",
    "draws": "other draws",
    "before": "changed outside",
    "batch": "other data",
    "key": "other key",
    "contribution": "other gradient",
    "total": "other sum",
    "update": "other update",
}


@dataclass(frozen=True)
class PartDifference:
    """The first part of a step that differs between two computations of it.

    Attributes:
        part: A name in `PARTS`.
        number: The first logical replica that differs; None if the part belongs to none.
        numbers: All that differ.
        of: How many replicas were compared.
        leaves: The leaves of the first one that differ, by path.
        equal: The parts before it that both have, and that are equal.
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
        text = PARTS[self.part]
        if self.number is None or self.part in _GENERATORS:
            return text
        if len(self.numbers) == self.of and self.of > 1:
            return f"{text} of every logical replica"
        shown = ", ".join(map(str, self.numbers[:8])) + (", ..." if len(self.numbers) > 8 else "")
        many = "s" if len(self.numbers) > 1 else ""
        return f"{text} of logical replica{many} {shown}"


_GENERATORS = ("generators", "draws")


@dataclass(frozen=True)
class ReplayedRun:
    """One of the two runs.

    Attributes:
        run: The run directory.
        workers: Processes of its replay.
        devices: Devices of each; None if the framework chose.
        result: What its replay has to do with what it recorded.
        is_repeatable: False if two replays of it differ. Asked only if it is not reproduced.
    """

    run: str
    workers: int
    devices: int | None
    result: StretchResult
    is_repeatable: bool = True


@dataclass(frozen=True)
class StepComparison:
    """What is known about the step at which two runs part.

    Attributes:
        step: The step.
        runs: Their replays.
        part: The first part that differs between the replays; None for none.
        generators: Those that both replays drew from in the step, and that differed before it.
        is_alike: The replays have the same bits.
        is_topology: They have them once both run on the same devices and processes.
        has_step_before: The bits of the step before it are known in both replays.
    """

    step: int
    runs: tuple[ReplayedRun, ReplayedRun]
    part: PartDifference | None
    generators: tuple[str, ...]
    is_alike: bool
    is_topology: bool
    has_step_before: bool

    def wrong(self) -> tuple[str, ...]:
        """The runs that have other bits than their program computes, every time."""
        return tuple(
            each.run
            for each in self.runs
            if each.result.verdict == "differs" and each.result.what != "end" and each.is_repeatable
        )


def likely_cause(found: StepComparison) -> Diagnosis:
    """The cause with its evidence. Only what all replays agree on is named."""
    evidence = [line for each in found.runs for line in _of_run(each)]
    part = found.part
    if not all(each.is_repeatable for each in found.runs):
        return diagnosis("not repeatable", *evidence)
    results = [each.result for each in found.runs]
    if any(result.verdict == "not comparable" or result.what == "end" for result in results):
        return diagnosis("other program", *evidence)
    if found.wrong():
        if found.is_alike:
            evidence.append("the replays of both runs have the same bits")
        cause = diagnosis("computed wrongly", *evidence)
        starts = [(e.run, e.result.start) for e in found.runs if e.run in found.wrong()]
        back = [f"perdure rollback {run}@{start}" for run, start in starts if start is not None]
        advice = (
            f" Continue from the checkpoint before this step: {'; '.join(back)}." if back else ""
        )
        return replace(cause, advice=cause.advice + advice)
    if part is None:
        evidence.append("no part of the step that the program reports differs")
        return diagnosis("unknown", *evidence)
    if part.equal:
        evidence.append(f"equal in both: {', '.join(PARTS[name] for name in part.equal)}")
    if found.generators and part.part != "generators":
        names = ", ".join(found.generators)
        evidence.append(f"the random generators of the process differed before the step: {names}")
    if part.part == "before" and not found.has_step_before:
        evidence.append(
            f"the program does not report step {found.step - 1}: the runs may have parted earlier. "
            f"Call `manager.save` or `manager.journal.record` after every step"
        )
        return diagnosis("unknown", *evidence)
    if found.is_topology:
        evidence.append("on the same devices and processes both have the same bits")
        return diagnosis("topology", *evidence)
    if part.part == "batch" and (same := _same_batch(found)) is not None:
        return diagnosis(same[0], *evidence, same[1])
    if part.part == "state" and "update" in part.equal:
        return diagnosis("changed outside", *evidence)
    return diagnosis(_CAUSES.get(part.part, "other step"), *evidence)


def _of_run(each: ReplayedRun) -> list[str]:
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


def _same_batch(found: StepComparison) -> tuple[str, str] | None:
    """The cause, and the text, if one run has in this step the batch of another step of the other.

    The data start again only if it is the first batch that the other has recorded.
    """
    names = [each.run for each in found.runs]
    batches = [
        {entry.step: entry.batch for entry in read_journal(Run(name).storage)} for name in names
    ]
    for this, other in ((0, 1), (1, 0)):
        batch = batches[this].get(found.step)
        same = [step for step, known in batches[other].items() if batch and known == batch]
        if same:
            here, there = names[this], names[other]
            text = f"the batch of step {found.step} in {here} is that of step {same[0]} in {there}"
            begins_again = same[0] == min(batches[other]) and same[0] < found.step
            return "data position" if begins_again else "other position", text
    return None


def first_different_part(one: Parts, two: Parts) -> PartDifference | None:
    """The first part that both have and that differs; None for none.

    Generators of the process count only in a loop without a strategy, where nothing else says which
    random numbers a step has.

    Args:
        one: Digests of the leaves of each part.
        two: Those of the other computation.
    """
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
