"""Finds out why a faulted run differs, by putting back one thing after the other and comparing again.

Invariant: a cause is named only if two of two runs under the same faults differ, and two of two in
which it alone is put back or taken away do not; or, for what another machine or topology does, if
undisturbed runs differ in which it alone is added. Skipped steps, failures and unreadable checkpoints
are read off the run itself. Otherwise the cause is "unknown", and the evidence lists what was tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from perdure.drill import causes
from perdure.drill.causes import CACHE_PROBES, ENVIRONMENT_PROBES, Diagnosis, diagnosis
from perdure.drill.compare import RunDifference, bits_of, compare, reference
from perdure.drill.fault_plan import AFTER_COMMIT, LAST, kill_after_commit
from perdure.drill.resume_probe import HELD, ITERATORS
from perdure.drill.scenario import Launch, Outcome, Scenario
from perdure.drill.undisturbed_diagnosis import (
    UNTRIED,
    Probes,
    diagnose_undisturbed,
    repeats_for,
    steady_cause,
)
from perdure.text import few

_MOST_SINGLE = 10
Unit = dict[str, Any]


def diagnose_run(
    probes: Probes, scenario: Scenario, outcome: Outcome, seen: RunDifference | None
) -> Diagnosis:
    """Find out why a faulted run differs from the undisturbed one, or does not finish."""
    if seen is not None and seen.unreadable:
        return diagnosis("unreadable", seen.unreadable)
    if (found := _early_exit(probes, outcome, seen)) is not None:
        return found
    if scenario.place != LAST and (found := _counted_again(probes, outcome, seen)) is not None:
        return found
    if (found := _added(probes, _changes(probes, scenario))) is not None:
        return found
    if scenario.place == LAST and (seen is None or not seen.leaves or seen.is_of_export):
        return _happens_again(probes, scenario, outcome, seen, "end")
    if seen is None or (outcome.problem and not seen.leaves):
        return _happens_again(probes, scenario, outcome, seen, "fails after a resume")
    resume = ResumeDiagnosis(probes, scenario)
    if (found := resume.find()) is not None:
        return found if found.cause != "unknown" else resume.find_steady()
    if resume.attempts:  # it differs at each resume, and each time in another way
        return steady_cause(
            lambda *names: probes.faulted(resume.attempts, *names)[0],
            repeats_for(0.25),
            resume.evidence,
        )
    controls = [probes.undisturbed() for _ in range(3)]
    for each in controls:
        if (found := probes.difference(each)) is not None:
            return diagnose_undisturbed(probes, each, found)
    if (found := _added(probes, _plants(probes), resume.evidence)) is not None:
        return found
    return diagnosis(
        "unknown",
        *resume.evidence,
        "3 more undisturbed runs are equal, also with what another machine does otherwise, so the "
        "difference depends on the moment of the fault",
    )


def _early_exit(probes: Probes, outcome: Outcome, seen: RunDifference | None) -> Diagnosis | None:
    """Whether the program took SIGTERM for its end; read off the run, without another one."""
    last = outcome.attempts[-1] if outcome.attempts else None
    if last is None or last.ended != "exit 0" or seen is None or seen.leaves:
        return None
    hits = [f.what for f in last.faults if f.what.startswith(("SIGTERM", "term "))]
    end, whole = outcome.end().get(seen.run), probes.plain.end().get(seen.run)
    if not hits or whole is None or (end is not None and end.step >= whole.step):
        return None
    at = 0 if end is None else end.step
    text = (
        f"{hits[-1]}; then it exited with 0, {whole.step - at} steps before its end: the newest "
        f"checkpoint is of step {at}, and that of an undisturbed run of step {whole.step}"
    )
    return diagnosis("early exit", text)


def _counted_again(
    probes: Probes, outcome: Outcome, seen: RunDifference | None
) -> Diagnosis | None:
    """Whether the loop of a resumed run made all its steps once more; read off the run."""
    if seen is None or seen.leaves:
        return None
    end, whole = outcome.end().get(seen.run), probes.plain.end().get(seen.run)
    if end is None or whole is None or end.step <= whole.step:
        return None
    text = f"its last checkpoint is of step {end.step}, and that of an undisturbed run of step "
    return diagnosis("counted again", f"{text}{whole.step}; what both have is equal")


def _happens_again(
    probes: Probes,
    scenario: Scenario,
    outcome: Outcome,
    seen: RunDifference | None,
    cause: str,
) -> Diagnosis:
    """Whether a program that fails, or does not end as it did, does so again under the same faults."""
    what = outcome.problem or (seen.what if seen is not None else "")
    again, _ = probes.faulted(scenario.attempts)
    difference = probes.difference(again) if cause == "end" else None
    if again.problem or difference is not None:
        second = again.problem or (difference.what if difference is not None else "")
        return diagnosis(cause, what, f"and again under the same faults: {second}")
    return diagnosis("unknown", what, "the same faults again: the program ends as it should")


Change = tuple[str, str, Callable[[], Outcome]]
"""What another machine, topology or clock does otherwise: the cause, the change in words, a run."""


def _changes(probes: Probes, scenario: Scenario) -> Iterator[Change]:
    """What a scenario changes besides its kills."""
    for attempt in scenario.attempts:
        for what in ("devices", "workers"):
            if (count := getattr(attempt, what)) is not None:
                run = partial(probes.undisturbed, **{what: count})
                yield "topology", f"on {count} {what}", run
        for planned in (fault for fault in attempt.injected if fault.act == "clock"):
            # At a step of one attempt, also if it hit at a restore: nothing else happens then.
            jump = replace(planned, point="step", step=min(probes.observed.steps), nth=1)
            what = f"with a jump ({jump.describe_act()})"
            yield "time", what, lambda jump=jump: probes.faulted((Launch((jump,)),))[0]
    if any(attempt.plants for attempt in scenario.attempts):
        yield from _plants(probes)


def _plants(probes: Probes) -> Iterator[Change]:
    for plant, cause in ENVIRONMENT_PROBES.items():
        yield cause, f"with {plant}", partial(probes.undisturbed, plant)


def _added(
    probes: Probes, changes: Iterable[Change], tried: Sequence[str] = ()
) -> Diagnosis | None:
    """The first change that alone makes undisturbed runs differ, while one without it is equal."""
    for cause, what, run in changes:
        seen = [probes.defect(run()) for _ in range(2)]
        if all(seen) and probes.difference(probes.undisturbed()) is None:
            text = f"2 of 2 undisturbed runs {what}, and with nothing else, differ: {seen[0]}"
            return diagnosis(cause, *tried, text)
    return None


# ---------------------------------------------------------------- what a resumed run lacks


class ResumeDiagnosis:
    """The diagnosis of one faulted run; under the faults `attempts` it always differs."""

    def __init__(self, probes: Probes, scenario: Scenario) -> None:
        self.evidence: list[str] = []
        self.attempts: tuple[Launch, ...] = ()
        self._last = Path()  # the directory of the last run
        self._probes = probes
        self._scenario = scenario

    def find(self) -> Diagnosis | None:
        """The cause; None if no faults make the run differ each time, and in the same way."""
        runs = self._reproduce()
        if runs is None:
            return None
        if (skipped := self._skipped(runs[0])) is not None:
            return diagnosis("skipped steps", *self.evidence, skipped)
        if compare(runs[0], runs[1])[1] is not None:
            self.evidence.append("these two runs differ from each other as well")
            return None
        if self._is_gone("a fixed number of the process and of the attempt", "process"):
            return diagnosis("process", *self.evidence)
        listed = self._list()
        if listed is None:
            return diagnosis("unknown", *self.evidence)
        return self._put_back(listed["units"], listed["iterators"], runs[0])

    def find_steady(self) -> Diagnosis:
        """The probe under which two resumed runs are equal to an undisturbed run under it."""
        for probe, cause, meaning in (*causes.NONDETERMINISM_PROBES, *CACHE_PROBES):
            if probe == "no jit" and "jax" not in self._probes.observed.modules:
                continue
            plain = self._probes.undisturbed(probe)
            if plain.problem:
                self.evidence.append(f"with {meaning}, in both runs: {UNTRIED}: {plain.problem}")
            elif self._is_gone(f"{meaning}, in both runs", probe, plain=plain):
                return diagnosis(cause, *self.evidence)
        return diagnosis("unknown", *self.evidence)

    # ---------------------------------------------------------------- is it there each time?

    def _reproduce(self) -> list[Outcome] | None:
        """Two runs that differ, under the simplest faults that make them."""
        own = self._scenario.attempts
        usable = self._probes.observed.restorable
        tries = {"the same faults again": own}
        if self._scenario.kind != AFTER_COMMIT and usable:
            middle = (kill_after_commit(usable[len(usable) // 2]),)
            tries = {"a run that is killed once, right after a checkpoint": middle, **tries}
        for what, attempts in tries.items():
            runs = [self._probes.faulted(attempts)[0] for _ in range(2)]
            differences = [self._probes.difference(run) for run in runs]
            known = [
                found.what
                for run, found in zip(runs, differences, strict=True)
                if found is not None and (found.leaves or not run.problem)
            ]
            if len(known) == len(runs):
                fired = "; ".join(runs[0].fired)
                self.evidence.append(f"control: {what} ({fired}): 2 of 2 differ, {known[0]}")
                self.attempts = attempts
                return runs
            self.evidence.append(f"control: {what}: {len(known)} of 2 differ")
        return None

    def _skipped(self, run: Outcome) -> str | None:
        """The step that the loop did not do after a restore."""
        for attempt in run.attempts:
            later = [s for s in self._probes.observed.steps if s > (attempt.restored or 0)]
            if attempt.restored and attempt.first and later and attempt.first > min(later):
                return (
                    f"step {attempt.restored} was restored, and the next step that the loop reported "
                    f"is {attempt.first}; without a fault it is {min(later)}"
                )
        return None

    def _list(self) -> dict[str, Any] | None:
        """What differs between the process at the checkpoint and the resumed one."""
        outcome, directory = self._probes.faulted(self.attempts, "resume")
        difference = self._probes.difference(outcome)
        paths = sorted((directory / HELD).glob("differing-*.json"))
        if outcome.problem or difference is None or not paths:
            why = outcome.problem or "the run could not be watched"
            if difference is None and not outcome.problem:
                why = "a run that was only watched ended equal"
            self.evidence.append(f"what the process holds {UNTRIED}: {why}")
            return None
        found = [json.loads(path.read_text()) for path in paths]
        units = {unit["name"]: unit for listed in found for unit in listed["units"]}
        iterators = {name for listed in found for name in listed["iterators"]}
        return {"units": [*units.values()], "iterators": sorted(iterators)}

    # ---------------------------------------------------------------- one part after the other

    def _put_back(self, units: Sequence[Unit], iterators: Sequence[str], run: Outcome) -> Diagnosis:
        by_kind = {
            kind: [unit for unit in units if unit["kind"] == kind]
            for kind in ("generator", "number", "array", "file")
        }
        generators = [unit["name"] for unit in by_kind["generator"]]
        if not generators:
            self.evidence.append(
                "every random generator that the program and the process hold has the state that it "
                "had at the checkpoint"
            )
        elif self._is_gone(f"{few(generators)} put back", put=generators):
            return self._diagnose_generators(by_kind["generator"])
        if not iterators:
            self.evidence.append("the loop and the program hold no iterator that could be advanced")
        elif self._is_gone(
            f"what the loop reads from ({few(iterators)}) advanced", put=[ITERATORS]
        ):
            return self._diagnose_iterators()
        values = [*by_kind["number"], *by_kind["array"]]
        for unit in values[:_MOST_SINGLE]:
            if self._is_gone(f"{unit['name']} ({unit['what']}) put back", put=[unit["name"]]):
                return self._unsaved(run)
        files = [unit["name"] for unit in by_kind["file"]]
        changed = few(f"{unit['name']} ({unit['what']})" for unit in by_kind["file"])
        if files and self._is_gone(f"{changed} put back before the start", put=files):
            return diagnosis("file", *self.evidence)
        others = [*generators, *files, *[ITERATORS] * bool(iterators)]
        return self._put_back_groups(others, values, run)

    def _diagnose_generators(self, units: Sequence[Unit]) -> Diagnosis:
        """Whether the needed generators begin again, or have another seed."""
        other = [unit["name"] for unit in units if unit["seed"] == "other"]
        same = [unit["name"] for unit in units if unit["seed"] != "other"]
        said = f"{few(other)} begins with another seed than in the first process"
        return self._choose_cause(same, "random generator", other, "other seed", said)

    def _diagnose_iterators(self) -> Diagnosis:
        """An iterator that gives numbers may be a schedule or a counter, and no data."""
        sorts: dict[str, str] = {}
        for path in (self._last / HELD).glob("items-*.json"):
            sorts |= json.loads(path.read_text())
        numbers = [name for name, sort in sorts.items() if sort == "number"]
        puts = [f"{ITERATORS} {name}" for name in numbers]
        data = [f"{ITERATORS} {name}" for name in sorts if name not in numbers]
        said = f"{few(numbers)}: each item is one number"
        return self._choose_cause(data, "data position", puts, "iterator", said)

    def _choose_cause(
        self, usual: Sequence[str], cause: str, special: Sequence[str], other: str, said: str
    ) -> Diagnosis:
        """Which of two sorts has to be put back; `other` is the cause of the `special` one."""
        if not special or (usual and self._is_gone(f"{few(usual)} alone", put=usual)):
            return diagnosis(cause, *self.evidence)
        if usual and not self._is_gone(f"{few(special)} alone", put=special):
            return diagnosis("several", *self.evidence, said, f"needed: {few([*special, *usual])}")
        return diagnosis(other, *self.evidence, said)

    def _put_back_groups(
        self, others: Sequence[str], values: Sequence[Unit], run: Outcome
    ) -> Diagnosis:
        # A whole number may be where the loop began, which is another one after a resume.
        safe = [unit["name"] for unit in values if not unit["what"].lstrip("-").isdigit()]
        everything = [unit["name"] for unit in values]
        groups = (safe, everything, others, [*others, *safe], [*others, *everything])
        for put in dict.fromkeys(map(tuple, groups)):
            if len(put) > 1 and self._is_gone(f"all of this put back: {few(put)}", put=put):
                return self._several(put, set(others), run)
        if not everything:
            self.evidence.append("no variable of the program differs from what it was")
        return diagnosis("unknown", *self.evidence)

    def _several(self, put: Sequence[str], others: set[str], run: Outcome) -> Diagnosis:
        """Leave out what is not needed, one after the other."""
        needed = list(put)
        for name in put[:_MOST_SINGLE]:
            fewer = [other for other in needed if other != name]
            if fewer and self._is_gone(f"{few(fewer)} put back, and not {name}", put=fewer):
                needed = fewer
        self.evidence.append(f"needed: {', '.join(needed)}")
        if not others & set(needed):
            return self._unsaved(run)
        return diagnosis("several", *self.evidence)

    def _is_gone(
        self, what: str, *probes: str, put: Sequence[str] = (), plain: Outcome | None = None
    ) -> bool:
        """Whether two of two runs are as `plain`, by default the undisturbed one; a run that fails
        shows nothing."""
        names = [*probes, *["resume"] * bool(put)]
        for number in range(2):
            outcome, self._last = self._probes.faulted(self.attempts, *names, put=put)
            difference = (
                self._probes.difference(outcome) if plain is None else compare(plain, outcome)[1]
            )
            if outcome.problem and (difference is None or not difference.leaves):
                self.evidence.append(f"with {what}: {UNTRIED}: {outcome.problem}")
                return False
            if difference is not None:
                often = "it is still there" if number == 0 else "it is there in 1 of 2 runs"
                self.evidence.append(f"with {what}, {often}")
                return False
        self.evidence.append(f"with {what}, the difference is gone in 2 of 2 runs")
        return True

    def _unsaved(self, run: Outcome) -> Diagnosis:
        """Unsaved state, or a metric if nothing that training changes ever differs."""
        largest = _largest_moving(self._probes.plain, run)
        known = reference(self._probes.plain)
        pairs = [(known.get((commit.run, commit.step)), commit) for commit in run.commits]
        if largest is None or any(
            bits_of(plain.leaves(), largest) != bits_of(commit.leaves(), largest)
            for plain, commit in pairs
            if plain is not None
        ):
            return diagnosis("unsaved state", *self.evidence)
        seen = f"{largest}, which training changes, is equal in every checkpoint of that run"
        return diagnosis("metric state", *self.evidence, seen)


def _largest_moving(plain: Outcome, run: Outcome) -> str | None:
    """The largest floating-point leaf that training changes: parameters and no counter."""
    runs = {commit.run for commit in run.commits}
    states = [commit.leaves() for commit in plain.commits if commit.run in runs]
    moving = [
        leaf
        for path, leaf in (states[-1] if states else {}).items()
        if "float" in leaf.dtype and leaf.text is None
        if len({bits_of(leaves, path) for leaves in states}) > 1
    ]
    return max(moving, key=lambda leaf: (leaf.nbytes, leaf.path)).path if moving else None
