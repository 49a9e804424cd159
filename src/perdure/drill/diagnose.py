"""Finds out why runs differ, by removing one possible cause after the other and comparing again.

Invariant: a cause is named only if the difference is gone in several runs in which this cause alone is
taken away, and is there in several in which it is not; or, for what another machine or topology does,
if it is there in several undisturbed runs in which this cause alone is added. Skipped steps, failures
and unreadable checkpoints are read off the run itself. Otherwise the cause is "unknown", and the
evidence lists what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations

from perdure.drill.causes import Diagnosis, diagnosis
from perdure.drill.compare import RunDifference, compare
from perdure.drill.fault_injection import describe_act
from perdure.drill.fault_plan import LAST
from perdure.drill.probe_runner import UNTRIED, ProbeRunner
from perdure.drill.probes import PLANTS
from perdure.drill.resume_diagnosis import ResumeDiagnosis
from perdure.drill.scenario import Launch, Outcome, Scenario
from perdure.text import few

STEADY = (
    # First, because every probe that runs code in the program leaves other bytes in free memory.
    ("memory", "memory", "the same pattern in all memory that nothing was written to"),
    ("clock", "time", "a clock that only counts how often it is read"),
    ("seed", "unseeded", "a fixed seed in place of the system's entropy"),
    ("hash", "hash order", "PYTHONHASHSEED=0"),
    ("addresses", "addresses", "the same addresses in each process (and PYTHONHASHSEED=0)"),
    ("process", "process", "a fixed number of the process and of the attempt"),
    ("one thread", "threads", "one thread"),
)
"""Each probe, the cause that it takes away, and what it does."""

_STALE = (
    ("no caches", "stale value", "functools.cache and lru_cache that keep nothing"),
    ("no jit", "stale value", "functions that JAX does not compile"),
)
"""What only a resumed process does otherwise: it computes a value anew that another one has kept."""

_PLANTED = dict(zip(PLANTS, ("directory order", "memory", "threads", "time"), strict=True))
_CHANCE = 0.02
_MOST_REPEATS = 10


def diagnose_undisturbed(
    runner: ProbeRunner, second: Outcome, difference: RunDifference
) -> Diagnosis:
    """Find out why two undisturbed runs differ; `second` is the one that differs from the first."""
    if difference.unreadable:
        return diagnosis("unreadable", difference.unreadable)
    later = [second, runner.undisturbed(), runner.undisturbed()]
    pairs = [*combinations([runner.plain, *later], 2)]
    equal = sum(compare(*pair)[1] is None for pair in pairs)
    if equal == 3 and all(runner.difference(each) is not None for each in later):
        return _left_over(runner, later)
    tried = [f"control: {equal} of the {len(pairs)} pairs of 4 runs are equal"]
    # One more of each, because few pairs say little about what is rare.
    repeats = repeats_for((equal + 1) / (len(pairs) + 2))
    found = _steady_cause(lambda *probes: runner.undisturbed(*probes), repeats, tried)
    if found.cause == "unknown" and _compare_repeats(runner.undisturbed, repeats) == "":
        return _left_over(runner, [runner.undisturbed()], found.evidence)
    return found


def _left_over(
    runner: ProbeRunner, later: Sequence[Outcome], tried: Sequence[str] = ()
) -> Diagnosis:
    """Later runs are equal. The cause is named if the first one has left a file outside."""
    more = [runner.undisturbed() for _ in range(3)]
    if any(compare(later[0], each)[1] is not None for each in more):
        said = "control: runs after the first are equal to each other now and then"
        if tried:
            return diagnosis("unknown", *tried, said)
        return _steady_cause(runner.undisturbed, _MOST_REPEATS, [said])
    number = len(later) + len(more)
    seen = f"the {number} runs after the first are equal to each other and differ from it"
    if tried:
        seen = f"the last {number} runs are equal to each other, and the first ones were not"
    outside = [name for name, file in runner.plain.files.items() if file.is_outside]
    if not outside:
        return diagnosis(
            "unknown",
            *tried,
            seen,
            "no file was seen that the program writes outside of its working directory (those that "
            "native code writes are not seen)",
        )
    return diagnosis(
        "left over", *tried, seen, f"the program writes outside of its directory: {few(outside)}"
    )


def repeats_for(equal: float) -> int:
    """How many runs have to be equal to each other so that chance is not the reason.

    Args:
        equal: The share of pairs of runs that are equal although the cause is there.
    """
    if equal <= 0:
        return 3
    if equal >= 1:
        return _MOST_REPEATS
    return min(_MOST_REPEATS, max(3, 1 + math.ceil(math.log(_CHANCE) / math.log(equal))))


def diagnose_run(
    runner: ProbeRunner, scenario: Scenario, outcome: Outcome, seen: RunDifference | None
) -> Diagnosis:
    """Find out why a faulted run differs from the undisturbed one, or does not finish."""
    if seen is not None and seen.unreadable:
        return diagnosis("unreadable", seen.unreadable)
    if (found := _early_exit(runner, outcome, seen)) is not None:
        return found
    if (found := _added(runner, _changes(runner, scenario))) is not None:
        return found
    if scenario.place == LAST and (seen is None or not seen.leaves or seen.is_of_export):
        return _happens_again(runner, scenario, outcome, seen, "end")
    if seen is None or (outcome.problem and not seen.leaves):
        return _happens_again(runner, scenario, outcome, seen, "fails after a resume")
    resume = ResumeDiagnosis(runner, scenario)
    if (found := resume.find()) is not None:
        if found.cause != "unknown" or resume.attempts is None:
            return found
        return _steady_resume(runner, resume.attempts, found)
    if resume.attempts is not None:  # it differs at each resume, and each time in another way
        attempts, evidence = resume.attempts, resume.evidence
        return _steady_cause(
            lambda *probes: runner.faulted(attempts, *probes)[0], repeats_for(0.25), evidence
        )
    controls = [runner.undisturbed() for _ in range(3)]
    for each in controls:
        if (found := runner.difference(each)) is not None:
            return diagnose_undisturbed(runner, each, found)
    if (found := _added(runner, _plants(runner), resume.evidence)) is not None:
        return found
    return diagnosis(
        "unknown",
        *resume.evidence,
        "3 more undisturbed runs are equal, also with what another machine does otherwise, so the "
        "difference depends on the moment of the fault",
    )


def _early_exit(
    runner: ProbeRunner, outcome: Outcome, seen: RunDifference | None
) -> Diagnosis | None:
    """Whether the program took SIGTERM for its end; read off the run, without another one."""
    last = outcome.attempts[-1] if outcome.attempts else None
    if last is None or last.ended != "exit 0" or seen is None or seen.leaves:
        return None
    hits = [f.what for f in last.faults if f.what.startswith(("SIGTERM", "term "))]
    end, whole = outcome.end().get(seen.run), runner.plain.end().get(seen.run)
    if not hits or whole is None or (end is not None and end.step >= whole.step):
        return None
    at = 0 if end is None else end.step
    text = (
        f"{hits[-1]}; then it exited with 0, {whole.step - at} steps before its end: the newest "
        f"checkpoint is of step {at}, and that of an undisturbed run of step {whole.step}"
    )
    return diagnosis("early exit", text)


def _happens_again(
    runner: ProbeRunner,
    scenario: Scenario,
    outcome: Outcome,
    seen: RunDifference | None,
    cause: str,
) -> Diagnosis:
    """Whether a program that fails, or does not end as it did, does so again under the same faults."""
    what = outcome.problem or (seen.what if seen is not None else "")
    again, _ = runner.faulted(scenario.attempts)
    difference = runner.difference(again) if cause == "end" else None
    if again.problem or difference is not None:
        second = again.problem or (difference.what if difference is not None else "")
        return diagnosis(cause, what, f"and again under the same faults: {second}")
    return diagnosis("unknown", what, "the same faults again: the program ends as it should")


def _steady_cause(run: Callable[..., Outcome], repeats: int, tried: Sequence[str]) -> Diagnosis:
    """The probe under which `repeats` runs are equal to each other, while runs without it are not."""
    evidence = list(tried)
    for probe, cause, meaning in STEADY:
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
    probes = tuple(probe for probe, _, _ in STEADY)
    result = _compare_repeats(run, repeats, *probes)
    if result:
        return diagnosis("unknown", *evidence, f"runs under all of these {result}")
    needed = [
        cause
        for probe, cause, _ in STEADY
        if _compare_repeats(run, repeats, *(other for other in probes if other != probe))
    ]
    evidence.append(f"{repeats} runs under all of these are equal")
    if not needed:
        return diagnosis("unknown", *evidence, "and also without each of them")
    return diagnosis(
        "several", *evidence, f"and differ again without any of these: {', '.join(needed)}"
    )


def _steady_resume(
    runner: ProbeRunner, attempts: Sequence[Launch], unknown: Diagnosis
) -> Diagnosis:
    """The probe under which two resumed runs are equal to an undisturbed run under it."""
    evidence = list(unknown.evidence)
    for probe, cause, meaning in (*STEADY, *_STALE):
        if probe == "no jit" and "jax" not in runner.observed.modules:
            continue
        if (found := _differs_under(runner, attempts, probe)) is None:
            text = f"with {meaning}, in both runs, the difference is gone in 2 of 2"
            return diagnosis(cause, *evidence, text)
        evidence.append(f"with {meaning}, in both runs, {found}")
    return diagnosis("unknown", *evidence)


def _differs_under(runner: ProbeRunner, attempts: Sequence[Launch], probe: str) -> str | None:
    """How two resumed runs under a probe differ from an undisturbed one under it; None if not."""
    plain = runner.undisturbed(probe)
    for _ in range(2):
        resumed = runner.faulted(attempts, probe)[0] if not plain.problem else plain
        if resumed.problem:
            return f"{UNTRIED}: {resumed.problem}"
        if compare(plain, resumed)[1] is not None:
            return "it is still there"
    return None


def _compare_repeats(run: Callable[..., Outcome], repeats: int, *probes: str) -> str:
    """How runs under `probes` compare; empty if they are all equal."""
    first: Outcome | None = None
    for _ in range(repeats):
        outcome = run(*probes)
        if outcome.problem:
            return f"{UNTRIED}: {outcome.problem}"
        if first is None:
            first = outcome
            continue
        _, difference = compare(first, outcome)
        if difference is not None:
            return f"differ ({difference.what})"
    return ""


@dataclass(frozen=True)
class _Change:
    """What another machine, topology or clock does otherwise, and the cause if that decides."""

    cause: str
    what: str
    run: Callable[[], Outcome]


def _changes(runner: ProbeRunner, scenario: Scenario) -> Iterator[_Change]:
    """What a scenario changes besides its kills."""
    for attempt in scenario.attempts:
        if attempt.devices is not None or attempt.workers is not None:
            topology = {"devices": attempt.devices, "workers": attempt.workers}
            on = f"{attempt.devices} devices" if attempt.devices else f"{attempt.workers} workers"
            yield _Change("topology", f"on {on}", partial(runner.undisturbed, **topology))
        for planned in (fault for fault in attempt.injected if fault.act == "clock"):
            # At a step of one attempt, also if it hit at a restore: nothing else happens then.
            jump = replace(planned, point="step", step=min(runner.observed.steps), nth=1)
            what = f"with a jump ({describe_act(asdict(jump))})"
            yield _Change("time", what, lambda jump=jump: runner.faulted((Launch((jump,)),))[0])
    if any(attempt.plants for attempt in scenario.attempts):
        yield from _plants(runner)


def _plants(runner: ProbeRunner) -> Iterator[_Change]:
    for plant, cause in _PLANTED.items():
        yield _Change(cause, f"with {plant}", partial(runner.undisturbed, plant))


def _added(
    runner: ProbeRunner, changes: Iterable[_Change], tried: Sequence[str] = ()
) -> Diagnosis | None:
    """The first change that alone makes undisturbed runs differ, while one without it is equal."""
    for change in changes:
        what = _all_differ(runner, [change.run() for _ in range(2)])
        if what is not None and runner.difference(runner.undisturbed()) is None:
            text = f"2 of 2 undisturbed runs {change.what}, and with nothing else, differ: {what}"
            return diagnosis(change.cause, *tried, text)
    return None


def _all_differ(runner: ProbeRunner, runs: Sequence[Outcome]) -> str | None:
    """The difference from the undisturbed run if each of the `runs` has one; otherwise None."""
    texts = []
    for outcome in runs:
        difference = runner.difference(outcome)
        if outcome.problem and (difference is None or not difference.leaves):
            texts.append(f"it fails: {outcome.problem}")
        elif difference is not None:
            texts.append(difference.what)
    return texts[0] if len(texts) == len(runs) else None
