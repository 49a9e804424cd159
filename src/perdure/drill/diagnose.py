"""Why runs differ: by taking one possible cause away after the other, and looking again.

No cause is named because it is usual. It is named because the difference goes with it, because the
leaves that differ leave no other, or, for the data position, because the others have been excluded;
what was tried and seen is in the evidence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.drill.compare import (
    RunDifference,
    bits,
    changing,
    compare,
    leaves_of,
)
from perdure.drill.execution import DEVICES, DrilledProgram, execute
from perdure.drill.probes import ITERATORS, shim
from perdure.drill.scenario import Fault, Launch, Observed, Outcome, Scenario

_UNTRIED = "could not be tried"
_BELOW = ": threads, or an operation that is not deterministic"


@dataclass(frozen=True)
class Diagnosis:
    """A cause by its name in `CAUSES`, what it means, what showed it, and how to mend it."""

    cause: str
    what: str
    advice: str
    evidence: tuple[str, ...]


CAUSES = {
    "time": (
        "the result depends on the clock",
        (
            "Let no value of time.time(), datetime.now() or a timer reach the state or the update; "
            "use the step instead, or read the clock once and keep the value in the state."
        ),
    ),
    "unseeded": (
        "something is drawn from an unseeded source",
        (
            "Seed it: np.random.default_rng(seed), random.seed(seed), torch.manual_seed(seed), "
            "keras.utils.set_random_seed(seed); derive what a step draws from (seed, step)."
        ),
    ),
    "hash order": (
        "the result depends on the order of a set of strings",
        "Sort what you iterate over: sorted(names). PYTHONHASHSEED changes in every process.",
    ),
    "random generator": (
        "a random generator is not restored",
        (
            "Derive every draw from the seed and the step, np.random.default_rng((seed, step)), or put "
            "the generator into the state that is saved: {'rng': generator.bit_generator.state, ...}."
        ),
    ),
    "data position": (
        "the data start again from the beginning after a resume",
        (
            "Take the batch of a step by its number (perdure.ArrayDataset: dataset.batch(step)), save "
            "the iterator with the state, or skip the first `start` batches after a restore."
        ),
    ),
    "metric state": (
        "something that is only counted or averaged is not saved",
        (
            "Put the sums and counts behind these leaves into the state, and go on from them after a "
            "restore; a mean alone cannot be continued."
        ),
    ),
    "topology": (
        "the result depends on how many devices or workers there are",
        (
            "A sum over devices (psum, all_reduce) adds in an order that follows their number. Use a "
            "strategy with replicas=V: its tree of sums does not know the devices."
        ),
    ),
    "fails after a resume": (
        "the program ends by itself after a resume",
        (
            "Read the last lines of its log below: what it needs is not in the checkpoint, or it "
            "does not fit what is there."
        ),
    ),
    "unreadable": (
        "what was committed cannot be read from the run directory any more",
        (
            "Look for what removes or rewrites files in the run directory: the end of the program, a "
            "clean-up of its own, another program. Deletion belongs to the manager: max_to_keep, or "
            "`perdure prune`."
        ),
    ),
    "unknown": (
        "none of the usual causes",
        (
            "What was tried is listed as evidence. Look at the leaves that differ first: what wrote "
            "them before and did not after?"
        ),
    ),
}


def diagnosis(cause: str, *evidence: str) -> Diagnosis:
    """A cause with what showed it."""
    what, advice = CAUSES[cause]
    return Diagnosis(cause, what, advice, evidence)


class ProbeRunner:
    """Runs the program again with one thing changed; each run in a directory of its own."""

    def __init__(
        self, program: DrilledProgram, where: Path, plain: Outcome, observed: Observed
    ) -> None:
        self.plain = plain
        self.observed = observed
        self._program = program
        self._where = where
        self._count = 0

    def undisturbed(
        self, *probes: str, devices: int | None = None, workers: int | None = None
    ) -> Outcome:
        """The program without a fault, under `probes`, on other devices or workers where given."""
        program = self._program
        if devices is not None:
            environment = {**program.environment, DEVICES: str(devices)}
            program = replace(program, environment=environment)
        if workers is not None:
            program = replace(program, workers=workers)
        return self._run(program, (), probes)[0]

    def faulted(self, attempts: Sequence[Launch], *probes: str) -> tuple[Outcome, Path]:
        """The program under `attempts` and `probes`, and where it ran."""
        return self._run(self._program, attempts, probes)

    def _run(
        self, program: DrilledProgram, attempts: Sequence[Launch], probes: tuple[str, ...]
    ) -> tuple[Outcome, Path]:
        self._count += 1
        where = self._where / f"probe-{self._count}"
        environment = shim(self._where, probes, program.environment) if probes else {}
        return execute(program, where, attempts, self.observed, environment), where


def diagnose_undisturbed(lab: ProbeRunner, seen: RunDifference) -> Diagnosis:
    """Why two undisturbed runs differ."""
    if seen.unreadable:
        return diagnosis("unreadable", seen.unreadable)
    tried: list[str] = []
    for probe, cause, meaning in (
        ("clock", "time", "with a clock that only counts how often it is read"),
        ("seed", "unseeded", "with a fixed seed in place of the system's entropy"),
        ("hash", "hash order", "with PYTHONHASHSEED=0"),
    ):
        said = _twice(lab, probe)
        if said == "":
            return diagnosis(cause, *tried, f"two runs {meaning} are equal")
        tried.append(f"two runs {meaning} {said}")
    said = _twice(lab, "clock", "seed", "hash")
    if said == "":
        return diagnosis("unseeded", *tried, "two runs under all three together are equal")
    return diagnosis(
        "unknown",
        *tried,
        f"two runs under all three {said}{'' if said.startswith(_UNTRIED) else _BELOW}",
    )


def diagnose_run(
    lab: ProbeRunner, scenario: Scenario, found: Outcome, seen: RunDifference | None
) -> Diagnosis:
    """Why a faulted run differs from the undisturbed one, or does not come to its end."""
    if seen is not None and seen.unreadable:
        return diagnosis("unreadable", seen.unreadable)
    if seen is None or (found.problem and not seen.leaves):
        return diagnosis("fails after a resume", found.problem)
    if (moved := _topology(lab, scenario)) is not None:
        return moved
    if (jumped := _clock(lab, scenario)) is not None:
        return jumped
    evidence: list[str] = []
    for what, attempts in (
        ("a run that is killed once, right behind a checkpoint", _clean(lab)),
        ("the same faults again", scenario.attempts),
    ):
        again, where = lab.faulted(attempts)
        _, difference = compare(lab.plain, again)
        if difference is not None and difference.leaves:
            evidence.append(f"{what}, differs at {difference.what}")
            return _resumed(lab, attempts, again, difference, where, evidence)
        evidence.append(f"{what}, {'ends equal' if difference is None else difference.what}")
    return diagnosis("unknown", *evidence, "so it depends on the moment of the fault")


def _clean(lab: ProbeRunner) -> tuple[Launch, ...]:
    middle = max(1, len(lab.observed.commits) // 2)
    return (Launch((Fault("manifest.sync", "kill", nth=middle),)),)


def _resumed(
    lab: ProbeRunner,
    attempts: Sequence[Launch],
    again: Outcome,
    difference: RunDifference,
    where: Path,
    evidence: list[str],
) -> Diagnosis:
    untried: list[str] = []
    for probe, cause, meaning in (
        ("rng", "random generator", "with every random generator put back to where it stood"),
        ("iterators", "data position", "with every iterator moved on by the steps that were done"),
    ):
        probed, where = lab.faulted(attempts, probe)
        _, still = compare(lab.plain, probed)
        if probed.problem and not (still is not None and still.leaves):
            # One that fails shows nothing, and excludes nothing.
            evidence.append(f"{meaning}, it {_UNTRIED}: {probed.problem}")
            untried.append(cause)
            continue
        if still is None:
            return diagnosis(cause, *evidence, f"{meaning}, the difference is gone")
        evidence.append(f"{meaning}, it is still there")
    largest = _largest_moving(lab, difference)
    if largest in difference.equal:
        names = ", ".join(leaf.path for leaf in difference.leaves[:5])
        spread = _spread(lab, again, difference)
        later = f"later {spread} differs too" if spread else "nothing else differs up to the end"
        return diagnosis(
            "metric state",
            *evidence,
            f"at step {difference.step} {names} differ, and {largest}, which training changes, does "
            f"not: the update got the right batch and the right random numbers; {later}",
        )
    held = [path for path in leaves_of(again.commits[0]) if _tells_position(path)]
    evidence.append(
        f"leaves that could hold a data position: {', '.join(held)}"
        if held
        else "no leaf of the checkpoint looks like a data position"
    )
    if iterators := _told_iterators(where):
        evidence.append(f"the loop reads from {', '.join(iterators)}, new in every process")
    if "random generator" in untried:
        return diagnosis("unknown", *evidence, "so a random generator is not excluded")
    return diagnosis(
        "data position",
        *evidence,
        f"{largest or difference.leaves[0].path}, which the update writes, differs at once, so the "
        "update read something else: random numbers are excluded, the data are not",
    )


def _topology(lab: ProbeRunner, scenario: Scenario) -> Diagnosis | None:
    for attempt in scenario.attempts:
        if attempt.devices is None and attempt.workers is None:
            continue
        alone = lab.undisturbed(devices=attempt.devices, workers=attempt.workers)
        _, difference = compare(lab.plain, alone)
        on = f"{attempt.devices} devices" if attempt.devices else f"{attempt.workers} workers"
        if difference is not None and not alone.problem:
            return diagnosis(
                "topology", f"an undisturbed run on {on} differs as well: {difference.what}"
            )
    return None


def _clock(lab: ProbeRunner, scenario: Scenario) -> Diagnosis | None:
    jumps = [f for each in scenario.attempts for f in each.inside if f.act == "clock"]
    if not jumps:
        return None
    alone, _ = lab.faulted((Launch((jumps[0],)),))
    _, difference = compare(lab.plain, alone)
    if difference is None or (alone.problem and not difference.leaves):
        return None
    return diagnosis(
        "time", f"a run whose clock jumps, without any other fault, differs: {difference.what}"
    )


def _twice(lab: ProbeRunner, *probes: str) -> str:
    """What two runs under `probes` do: nothing where they are equal."""
    one, other = lab.undisturbed(*probes), lab.undisturbed(*probes)
    if problem := one.problem or other.problem:
        return f"{_UNTRIED}: {problem}"
    _, difference = compare(one, other)
    return "" if difference is None else f"differ ({difference.what})"


def _largest_moving(lab: ProbeRunner, difference: RunDifference) -> str | None:
    """The largest leaf of floats that training changes: parameters, and no counter."""
    commits = [commit for commit in lab.plain.commits if commit.run == difference.run]
    held = leaves_of(commits[-1])
    floats = [path for path, leaf in held.items() if "float" in leaf.dtype and leaf.text is None]
    return max(changing(commits, floats), key=lambda path: held[path].nbytes, default=None)


def _spread(lab: ProbeRunner, again: Outcome, difference: RunDifference) -> str:
    """A leaf that is equal at the first difference and not at the end; empty where there is none."""
    expected, found = lab.plain.end().get(difference.run), again.end().get(difference.run)
    if expected is None or found is None or expected.step != found.step:
        return ""
    here, there = leaves_of(expected), leaves_of(found)
    moved = [path for path in difference.equal if bits(here, path) != bits(there, path)]
    return moved[0] if moved else ""


def _told_iterators(where: Path) -> list[str]:
    path = where / ITERATORS
    return json.loads(path.read_text()) if path.exists() else []


def _tells_position(path: str) -> bool:
    return any(word in path.lower() for word in ("data", "iter", "position", "batch", "loader"))
