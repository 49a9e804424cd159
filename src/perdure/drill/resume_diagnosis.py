"""Finds out what a resumed run lacks: puts back what the process held, part by part.

Invariant: a cause is named only if two of two runs killed at the same place differ, and two of two in
which that part was put back do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.drill.causes import Diagnosis, diagnosis
from perdure.drill.compare import bits, changing, compare, leaves_of, reference
from perdure.drill.fault_plan import AFTER_COMMIT, kill_after_commit
from perdure.drill.probe_runner import UNTRIED, ProbeRunner
from perdure.drill.resume_probe import HELD, ITERATORS
from perdure.drill.scenario import Launch, Outcome, Scenario
from perdure.text import few

_MOST_SINGLE = 10
Unit = dict[str, Any]


class ResumeDiagnosis:
    """The diagnosis of one faulted run that differs.

    Attributes:
        evidence: What was tried, in order, and what came of it.
        attempts: The faults under which the difference is there each time; None if there are none.
    """

    def __init__(self, runner: ProbeRunner, scenario: Scenario) -> None:
        self.evidence: list[str] = []
        self.attempts: tuple[Launch, ...] | None = None
        self._last = Path()  # the directory of the last run
        self._runner = runner
        self._scenario = scenario

    def find(self) -> Diagnosis | None:
        """The cause; None if no faults make the run differ each time, and in the same way."""
        runs = self._reproduce()
        if runs is None or self.attempts is None:
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

    # ---------------------------------------------------------------- is it there each time?

    def _reproduce(self) -> list[Outcome] | None:
        """Two runs that differ, under the simplest faults that make them."""
        own = self._scenario.attempts
        usable = self._runner.observed.restorable
        tries = {"the same faults again": own}
        if self._scenario.kind != AFTER_COMMIT and usable:
            middle = (kill_after_commit(usable[len(usable) // 2]),)
            tries = {"a run that is killed once, right after a checkpoint": middle, **tries}
        for what, attempts in tries.items():
            runs = [self._runner.faulted(attempts)[0] for _ in range(2)]
            differences = [self._runner.difference(run) for run in runs]
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
            later = [s for s in self._runner.observed.steps if s > (attempt.restored or 0)]
            if attempt.restored and attempt.first and later and attempt.first > min(later):
                return (
                    f"step {attempt.restored} was restored, and the next step that the loop reported "
                    f"is {attempt.first}; without a fault it is {min(later)}"
                )
        return None

    def _list(self) -> dict[str, Any] | None:
        """What differs between the process at the checkpoint and the resumed one."""
        outcome, directory = self._runner.faulted(self.attempts or (), "resume")
        difference = self._runner.difference(outcome)
        paths = sorted((directory / HELD).glob("differing-*.json"))
        if outcome.problem or difference is None or not paths:
            why = outcome.problem or "the run could not be watched"
            if difference is None and not outcome.problem:
                why = "a run that was only watched ended equal"
            self.evidence.append(f"what the process holds {UNTRIED}: {why}")
            return None
        units: dict[str, Unit] = {}
        iterators: list[str] = []
        for path in paths:
            listed = json.loads(path.read_text())
            units |= {unit["name"]: unit for unit in listed["units"]}
            iterators += listed["iterators"]
        return {"units": list(units.values()), "iterators": sorted(set(iterators))}

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
            return self._of_generators(by_kind["generator"])
        if not iterators:
            self.evidence.append("the loop and the program hold no iterator that could be advanced")
        elif self._is_gone(
            f"what the loop reads from ({few(iterators)}) advanced", put=[ITERATORS]
        ):
            return self._of_iterators()
        values = [*by_kind["number"], *by_kind["array"]]
        for unit in values[:_MOST_SINGLE]:
            if self._is_gone(f"{unit['name']} ({unit['what']}) put back", put=[unit["name"]]):
                return self._unsaved(run)
        files = [unit["name"] for unit in by_kind["file"]]
        changed = few(f"{unit['name']} ({unit['what']})" for unit in by_kind["file"])
        if files and self._is_gone(f"{changed} put back before the start", put=files):
            return diagnosis("file", *self.evidence)
        return self._put_back_groups([*generators, *files], bool(iterators), values, run)

    def _of_generators(self, units: Sequence[Unit]) -> Diagnosis:
        """Whether those that are needed begin again, or were seeded otherwise."""
        other = [unit["name"] for unit in units if unit["seed"] == "other"]
        same = [unit["name"] for unit in units if unit["seed"] != "other"]
        said = "begins with another seed than in the first process"
        if not other or (same and self._is_gone(f"{few(same)} put back alone", put=same)):
            return diagnosis("random generator", *self.evidence)
        self.evidence.append(f"{few(other)} {said}")
        if same and not self._is_gone(f"{few(other)} put back alone", put=other):
            return diagnosis("several", *self.evidence, f"needed: {few([*other, *same])}")
        return diagnosis("other seed", *self.evidence)

    def _of_iterators(self) -> Diagnosis:
        """An iterator that gives numbers may be a schedule or a counter, and no data."""
        sorts: dict[str, str] = {}
        for path in (self._last / HELD).glob("items-*.json"):
            sorts |= json.loads(path.read_text())
        single = {
            sort: [f"{ITERATORS} {name}" for name in sorts if sorts[name] == sort]
            for sort in ("data", "number")
        }
        if not single["number"] or (
            single["data"]
            and self._is_gone("only what gives no plain numbers advanced", put=single["data"])
        ):
            return diagnosis("data position", *self.evidence)
        if single["data"] and not self._is_gone(
            "only what gives plain numbers advanced", put=single["number"]
        ):
            return diagnosis("several", *self.evidence, f"needed: {few(sorts)}")
        names = few(name for name in sorts if sorts[name] == "number")
        return diagnosis("iterator", *self.evidence, f"{names}: each item is one number")

    def _put_back_groups(
        self, others: Sequence[str], iterators: bool, values: Sequence[Unit], run: Outcome
    ) -> Diagnosis:
        # A whole number may be where the loop began, which is another one after a resume.
        safe = [unit["name"] for unit in values if not unit["what"].lstrip("-").isdigit()]
        everything = [unit["name"] for unit in values]
        others = [*others, *[ITERATORS] * iterators]
        tried: list[list[str]] = []
        for put in (safe, everything, others, [*others, *safe], [*others, *everything]):
            if len(put) < 2 or put in tried:
                continue
            tried.append(put)
            if self._is_gone(f"all of this put back: {few(put)}", put=put):
                return self._several(put, set(others), run)
        if not everything:
            self.evidence.append("no variable of the program differs from what it was")
        return diagnosis("unknown", *self.evidence)

    def _several(self, put: list[str], others: set[str], run: Outcome) -> Diagnosis:
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

    def _is_gone(self, what: str, *probes: str, put: Sequence[str] = ()) -> bool:
        """Whether the difference is gone in two of two runs; a run that fails shows nothing."""
        names = [*probes, *["resume"] * bool(put)]
        for number in range(2):
            outcome, self._last = self._runner.faulted(self.attempts or (), *names, put=put)
            difference = self._runner.difference(outcome)
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
        largest = _largest_moving(self._runner.plain, run)
        if largest is not None and not _ever_differs(self._runner.plain, run, largest):
            return diagnosis(
                "metric state",
                *self.evidence,
                f"{largest}, which training changes, is equal in every checkpoint of that run",
            )
        return diagnosis("unsaved state", *self.evidence)


def _largest_moving(plain: Outcome, run: Outcome) -> str | None:
    """The largest floating-point leaf that training changes: parameters and no counter."""
    runs = {commit.run for commit in run.commits}
    commits = [commit for commit in plain.commits if commit.run in runs]
    if not commits:
        return None
    leaves = leaves_of(commits[-1])
    floats = [path for path, leaf in leaves.items() if "float" in leaf.dtype and leaf.text is None]
    return max(changing(commits, floats), key=lambda path: leaves[path].nbytes, default=None)


def _ever_differs(plain: Outcome, run: Outcome, path: str) -> bool:
    known = reference(plain)
    return any(
        bits(leaves_of(other), path) != bits(leaves_of(commit), path)
        for commit in run.commits
        if (other := known.get((commit.run, commit.step))) is not None
    )
