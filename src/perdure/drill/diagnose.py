"""Finds out why runs differ, by removing one possible cause after the other and comparing again.

A cause is reported because the difference disappears with it, because the leaves that differ allow no
other, or, for the data position, because the others were excluded. The evidence lists what was tried.
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
from perdure.drill.probes import ITERATORS, probe_environment
from perdure.drill.scenario import Fault, Launch, Observed, Outcome, Scenario

_UNTRIED = "could not be tried"
_BELOW = ": threads, or an operation that is not deterministic"


@dataclass(frozen=True)
class Diagnosis:
    """A cause by its name in `CAUSES`, its meaning, how to repair it, and the evidence."""

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
        "random numbers are drawn from an unseeded source",
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
            "Put the sums and counts from which these leaves are computed into the state, and continue "
            "from them after a restore; a mean alone cannot be continued."
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
        "the program fails by itself after a resume",
        (
            "Read the last lines of its log below: something that it needs is missing from the "
            "checkpoint, or does not fit what the checkpoint holds."
        ),
    ),
    "unreadable": (
        "a committed checkpoint cannot be read from the run directory any more",
        (
            "Look for what removes or rewrites files in the run directory: the end of the program, a "
            "clean-up of its own, another program. Deletion belongs to the manager: max_to_keep, or "
            "`perdure prune`."
        ),
    ),
    "unknown": (
        "none of the usual causes",
        (
            "The evidence lists what was tried. Begin with the leaves that differ: which code writes "
            "them, and what does it read?"
        ),
    ),
}


def diagnosis(cause: str, *evidence: str) -> Diagnosis:
    """The diagnosis for a name in `CAUSES`, with its evidence."""
    what, advice = CAUSES[cause]
    return Diagnosis(cause, what, advice, evidence)


class ProbeRunner:
    """Runs the program again with one thing changed, each time in a new directory."""

    def __init__(
        self, program: DrilledProgram, directory: Path, plain: Outcome, observed: Observed
    ) -> None:
        self.plain = plain
        self.observed = observed
        self._program = program
        self._directory = directory
        self._count = 0

    def undisturbed(
        self, *probes: str, devices: int | None = None, workers: int | None = None
    ) -> Outcome:
        """Run the program without a fault, under `probes`, on other devices or workers if given."""
        program = self._program
        if devices is not None:
            environment = {**program.environment, DEVICES: str(devices)}
            program = replace(program, environment=environment)
        if workers is not None:
            program = replace(program, workers=workers)
        return self._run(program, (), probes)[0]

    def faulted(self, attempts: Sequence[Launch], *probes: str) -> tuple[Outcome, Path]:
        """Run the program under `attempts` and `probes`; returns the directory of the run, too."""
        return self._run(self._program, attempts, probes)

    def _run(
        self, program: DrilledProgram, attempts: Sequence[Launch], probes: tuple[str, ...]
    ) -> tuple[Outcome, Path]:
        self._count += 1
        directory = self._directory / f"probe-{self._count}"
        environment = (
            probe_environment(self._directory, probes, program.environment) if probes else {}
        )
        return execute(program, directory, attempts, self.observed, environment), directory


def diagnose_undisturbed(runner: ProbeRunner, difference: RunDifference) -> Diagnosis:
    """Find out why two undisturbed runs differ."""
    if difference.unreadable:
        return diagnosis("unreadable", difference.unreadable)
    tried: list[str] = []
    for probe, cause, meaning in (
        ("clock", "time", "with a clock that only counts how often it is read"),
        ("seed", "unseeded", "with a fixed seed in place of the system's entropy"),
        ("hash", "hash order", "with PYTHONHASHSEED=0"),
    ):
        result = _run_twice(runner, probe)
        if result == "":
            return diagnosis(cause, *tried, f"two runs {meaning} are equal")
        tried.append(f"two runs {meaning} {result}")
    result = _run_twice(runner, "clock", "seed", "hash")
    if result == "":
        return diagnosis("unseeded", *tried, "two runs under all three together are equal")
    return diagnosis(
        "unknown",
        *tried,
        f"two runs under all three {result}{'' if result.startswith(_UNTRIED) else _BELOW}",
    )


def diagnose_run(
    runner: ProbeRunner, scenario: Scenario, outcome: Outcome, seen: RunDifference | None
) -> Diagnosis:
    """Find out why a faulted run differs from the undisturbed one, or does not finish."""
    if seen is not None and seen.unreadable:
        return diagnosis("unreadable", seen.unreadable)
    if seen is None or (outcome.problem and not seen.leaves):
        return diagnosis("fails after a resume", outcome.problem)
    if (moved := _diagnose_topology(runner, scenario)) is not None:
        return moved
    if (jumped := _diagnose_clock(runner, scenario)) is not None:
        return jumped
    evidence: list[str] = []
    for what, attempts in (
        ("a run that is killed once, right after a checkpoint", _one_kill(runner)),
        ("the same faults again", scenario.attempts),
    ):
        repeat, directory = runner.faulted(attempts)
        _, difference = compare(runner.plain, repeat)
        if difference is not None and difference.leaves:
            evidence.append(f"{what}, differs at {difference.what}")
            return _diagnose_resume(runner, attempts, repeat, difference, directory, evidence)
        evidence.append(f"{what}, {'ends equal' if difference is None else difference.what}")
    return diagnosis("unknown", *evidence, "so the difference depends on the moment of the fault")


def _one_kill(runner: ProbeRunner) -> tuple[Launch, ...]:
    middle = max(1, len(runner.observed.commits) // 2)
    return (Launch((Fault("manifest.sync", "kill", nth=middle),)),)


def _diagnose_resume(
    runner: ProbeRunner,
    attempts: Sequence[Launch],
    repeat: Outcome,
    difference: RunDifference,
    directory: Path,
    evidence: list[str],
) -> Diagnosis:
    untried: list[str] = []
    for probe, cause, meaning in (
        ("rng", "random generator", "with every random generator restored to its state"),
        ("iterators", "data position", "with every iterator advanced by the steps that were done"),
    ):
        probed, directory = runner.faulted(attempts, probe)
        _, remaining = compare(runner.plain, probed)
        if probed.problem and not (remaining is not None and remaining.leaves):
            # A probe that fails excludes nothing.
            evidence.append(f"{meaning}, it {_UNTRIED}: {probed.problem}")
            untried.append(cause)
            continue
        if remaining is None:
            return diagnosis(cause, *evidence, f"{meaning}, the difference is gone")
        evidence.append(f"{meaning}, it is still there")
    largest = _largest_moving(runner, difference)
    if largest in difference.equal:
        names = ", ".join(leaf.path for leaf in difference.leaves[:5])
        spread = _spread(runner, repeat, difference)
        later = f"later {spread} differs too" if spread else "nothing else differs up to the end"
        return diagnosis(
            "metric state",
            *evidence,
            f"at step {difference.step} {names} differ, and {largest}, which training changes, does "
            f"not: the update got the right batch and the right random numbers; {later}",
        )
    positions = [path for path in leaves_of(repeat.commits[0]) if _may_be_position(path)]
    evidence.append(
        f"leaves that could hold a data position: {', '.join(positions)}"
        if positions
        else "no leaf of the checkpoint looks like a data position"
    )
    if iterators := _recorded_iterators(directory):
        evidence.append(f"the loop reads from {', '.join(iterators)}, new in every process")
    if "random generator" in untried:
        return diagnosis("unknown", *evidence, "so a random generator is not excluded")
    return diagnosis(
        "data position",
        *evidence,
        f"{largest or difference.leaves[0].path}, which the update writes, differs at once, so the "
        "update read something else: random numbers are excluded, the data are not",
    )


def _diagnose_topology(runner: ProbeRunner, scenario: Scenario) -> Diagnosis | None:
    for attempt in scenario.attempts:
        if attempt.devices is None and attempt.workers is None:
            continue
        alone = runner.undisturbed(devices=attempt.devices, workers=attempt.workers)
        _, difference = compare(runner.plain, alone)
        on = f"{attempt.devices} devices" if attempt.devices else f"{attempt.workers} workers"
        if difference is not None and not alone.problem:
            return diagnosis(
                "topology", f"an undisturbed run on {on} differs as well: {difference.what}"
            )
    return None


def _diagnose_clock(runner: ProbeRunner, scenario: Scenario) -> Diagnosis | None:
    jumps = [f for launch in scenario.attempts for f in launch.injected if f.act == "clock"]
    if not jumps:
        return None
    alone, _ = runner.faulted((Launch((jumps[0],)),))
    _, difference = compare(runner.plain, alone)
    if difference is None or (alone.problem and not difference.leaves):
        return None
    return diagnosis(
        "time", f"a run whose clock jumps, without any other fault, differs: {difference.what}"
    )


def _run_twice(runner: ProbeRunner, *probes: str) -> str:
    """How two runs under `probes` compare; empty if they are equal."""
    one, other = runner.undisturbed(*probes), runner.undisturbed(*probes)
    if problem := one.problem or other.problem:
        return f"{_UNTRIED}: {problem}"
    _, difference = compare(one, other)
    return "" if difference is None else f"differ ({difference.what})"


def _largest_moving(runner: ProbeRunner, difference: RunDifference) -> str | None:
    """The largest floating-point leaf that training changes: parameters and no counter."""
    commits = [commit for commit in runner.plain.commits if commit.run == difference.run]
    leaves = leaves_of(commits[-1])
    floats = [path for path, leaf in leaves.items() if "float" in leaf.dtype and leaf.text is None]
    return max(changing(commits, floats), key=lambda path: leaves[path].nbytes, default=None)


def _spread(runner: ProbeRunner, repeat: Outcome, difference: RunDifference) -> str:
    """A leaf that is equal at the first difference and differs at the end; empty if there is none."""
    expected, actual = runner.plain.end().get(difference.run), repeat.end().get(difference.run)
    if expected is None or actual is None or expected.step != actual.step:
        return ""
    old, new = leaves_of(expected), leaves_of(actual)
    moved = [path for path in difference.equal if bits(old, path) != bits(new, path)]
    return moved[0] if moved else ""


def _recorded_iterators(directory: Path) -> list[str]:
    path = directory / ITERATORS
    return json.loads(path.read_text()) if path.exists() else []


def _may_be_position(path: str) -> bool:
    return any(word in path.lower() for word in ("data", "iter", "position", "batch", "loader"))
