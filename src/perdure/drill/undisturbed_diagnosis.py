"""Finds out why undisturbed runs differ, by removing one possible cause after the other.

Invariant: a cause is named only if several runs in which it alone is taken away are equal, and several
in which it is not are not. Otherwise the cause is "unknown", and the evidence lists what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from perdure.drill.causes import NONDETERMINISM_PROBES, Diagnosis, diagnosis
from perdure.drill.compare import RunDifference, compare
from perdure.drill.execution import DrilledProgram, execute
from perdure.drill.observed import Observed
from perdure.drill.scenario import Launch, Outcome
from perdure.text import few

UNTRIED = "could not be tried"
_CHANCE = 0.02
_MOST_REPEATS = 10


@dataclass
class Probes:
    """Runs the program again with one thing changed, each time in a new directory."""

    program: DrilledProgram
    directory: Path
    plain: Outcome
    observed: Observed
    progress: Callable[[str, None], None]
    count: int = 0

    def undisturbed(
        self, *probes: str, devices: int | None = None, workers: int | None = None
    ) -> Outcome:
        """Run the program without a fault, under `probes`, on other devices or workers if given."""
        return self.faulted([Launch(devices=devices, workers=workers)], *probes)[0]

    def faulted(
        self, attempts: Sequence[Launch], *probes: str, put: Sequence[str] = ()
    ) -> tuple[Outcome, Path]:
        """Run the program under `attempts` and `probes`; returns the directory of the run, too."""
        self.count += 1
        directory = self.directory / f"probe-{self.count:03d}"  # of one length
        self.progress(f"further run {self.count}", None)
        outcome = execute(self.program, directory, attempts, self.observed.limits, probes, put)
        outcome.hash_exports(self.plain.exports)
        return outcome, directory

    def difference(self, outcome: Outcome) -> RunDifference | None:
        """Where a run differs from the undisturbed one; None if it ended with the same bits."""
        return compare(self.plain, outcome)[1]

    def defect(self, outcome: Outcome) -> str:
        """How a run differs from the undisturbed one or, with no leaf that differs, why it failed."""
        difference = self.difference(outcome)
        if outcome.problem and (difference is None or not difference.leaves):
            return f"it fails: {outcome.problem}"
        return "" if difference is None else difference.what


def diagnose_undisturbed(probes: Probes, second: Outcome, difference: RunDifference) -> Diagnosis:
    """Find out why two undisturbed runs differ; `second` is the one that differs from the first."""
    if difference.unreadable:
        return diagnosis("unreadable", difference.unreadable)
    later = [second, probes.undisturbed(), probes.undisturbed()]
    pairs = [*combinations([probes.plain, *later], 2)]
    equal = sum(compare(*pair)[1] is None for pair in pairs)
    if equal == 3 and all(probes.difference(each) is not None for each in later):
        return _left_over(probes, later)
    tried = [f"control: {equal} of the {len(pairs)} pairs of 4 runs are equal"]
    # One more of each, because few pairs say little about what is rare.
    repeats = repeats_for((equal + 1) / (len(pairs) + 2))
    found = steady_cause(probes.undisturbed, repeats, tried)
    if found.cause == "unknown" and _compare_repeats(probes.undisturbed, repeats) == "":
        return _left_over(probes, [probes.undisturbed()], found.evidence)
    return found


def _left_over(probes: Probes, later: Sequence[Outcome], tried: Sequence[str] = ()) -> Diagnosis:
    """Later runs are equal. The cause is named if the first one has left a file outside."""
    more = [probes.undisturbed() for _ in range(3)]
    if any(compare(later[0], each)[1] is not None for each in more):
        said = "control: runs after the first are equal to each other now and then"
        if tried:
            return diagnosis("unknown", *tried, said)
        return steady_cause(probes.undisturbed, _MOST_REPEATS, [said])
    number = len(later) + len(more)
    seen = f"the {number} runs after the first are equal to each other and differ from it"
    if tried:
        seen = f"the last {number} runs are equal to each other, and the first ones were not"
    outside = [name for name, file in probes.plain.files.items() if file.is_outside]
    said = (
        f"the program writes outside of its directory: {few(outside)}"
        if outside
        else "no file was seen that the program writes outside of its working directory (those that "
        "native code writes are not seen)"
    )
    return diagnosis("left over" if outside else "unknown", *tried, seen, said)


def repeats_for(equal: float) -> int:
    """How many equal runs rule out chance, if a share of pairs is equal despite the cause."""
    if not 0 < equal < 1:
        return 3 if equal <= 0 else _MOST_REPEATS
    return min(_MOST_REPEATS, max(3, 1 + math.ceil(math.log(_CHANCE) / math.log(equal))))


def steady_cause(run: Callable[..., Outcome], repeats: int, tried: Sequence[str]) -> Diagnosis:
    """The probe under which `repeats` runs are equal to each other, while runs without it are not."""
    evidence = list(tried)
    for probe, cause, meaning in NONDETERMINISM_PROBES:
        result = _compare_repeats(run, repeats, probe)
        if result != "":
            evidence.append(f"runs with {meaning} {result}")
            continue
        evidence.append(f"{repeats} runs with {meaning} are equal")
        without = _compare_repeats(run, repeats)
        if without:
            return diagnosis(cause, *evidence, f"and runs without it {without}")
        evidence.append(f"but by now, {repeats} runs without it are equal, too")
        return diagnosis("unknown", *evidence)
    every = tuple(probe for probe, _, _ in NONDETERMINISM_PROBES)
    result = _compare_repeats(run, repeats, *every)
    if result:
        return diagnosis("unknown", *evidence, f"runs under all of these {result}")
    needed = [
        cause
        for probe, cause, _ in NONDETERMINISM_PROBES
        if _compare_repeats(run, repeats, *(other for other in every if other != probe))
    ]
    evidence.append(f"{repeats} runs under all of these are equal")
    if not needed:
        return diagnosis("unknown", *evidence, "and also without each of them")
    return diagnosis(
        "several", *evidence, f"and differ again without any of these: {', '.join(needed)}"
    )


def _compare_repeats(run: Callable[..., Outcome], repeats: int, *probes: str) -> str:
    """How runs under `probes` compare; empty if they are all equal."""
    first: Outcome | None = None
    for _ in range(repeats):
        outcome = run(*probes)
        if outcome.problem:
            return f"{UNTRIED}: {outcome.problem}"
        first = first or outcome
        if (difference := compare(first, outcome)[1]) is not None:
            return f"differ ({difference.what})"
    return ""
