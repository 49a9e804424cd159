"""The drill: two undisturbed runs, then faulted runs, each compared; a diagnosis if they differ."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from perdure.drill.causes import diagnosis
from perdure.drill.compare import compare, compare_best, newest_steps, read_back, stable_exports
from perdure.drill.drill_report import DrillOptions, DrillReport, DrillRow, DrillStopped
from perdure.drill.execution import LOGS, DrilledProgram, execute, holds_earlier_runs
from perdure.drill.fault_plan import KINDS, draw_scenario, estimated_seconds, plan, possible_kinds
from perdure.drill.observed import Observed, observe, other_topologies, phases_of
from perdure.drill.run_diagnosis import diagnose_run
from perdure.drill.scenario import Outcome, Scenario
from perdure.drill.undisturbed_diagnosis import Probes, diagnose_undisturbed
from perdure.errors import CommandError, LaunchError
from perdure.store.format import time_text
from perdure.supervise.options import checked_command
from perdure.text import counted

# Kinds of faults that have a probe of their own, and so a cause of their own.
_OWN_PROBES = ("other-devices", "other-workers", "other-machine", "clock-jump")
_OTHER_CLOCKS = ("clock-jump", "other-machine")
_NUMBER = re.compile(r"run-[0-9]+(-[0-9]+)?")
TRIES = 4
"""How often a scenario is drawn until its fault fires."""


Progress = Callable[[str, "DrillRow | None"], None]
"""Is called with what begins now, and with the kind and row of every faulted run that is over."""


def run_drill(
    command: Sequence[str],
    options: DrillOptions,
    directory: Path,
    progress: Progress = lambda *_: None,
) -> DrillReport:
    """Run `command` undisturbed and under faults, and compare every checkpoint.

    `directory` holds all runs; runs that differ are kept. Raises LaunchError if the command fails
    without a fault, saves nothing or never restores, if a fault cannot happen to it, or a directory
    cannot be used; DrillStopped, with the report so far, if this process was asked to end.
    """
    _check_arguments(command, options)
    directory = directory.absolute()  # the program runs elsewhere
    for pattern in ("undisturbed-*", "run-[0-9]*", "probes"):
        if found := next(directory.glob(pattern), None):
            raise holds_earlier_runs(found)
    program = DrilledProgram.here(
        command, directory, options.workers, options.read_only, options.environment
    )
    return _Drill(program, options, directory, progress).run()


def _check_arguments(command: Sequence[str], options: DrillOptions) -> None:
    """Raise `LaunchError` for what can be known before anything is run or written."""
    script = command[0] if command else ""
    if script.endswith(".py") and Path(script).is_file() and shutil.which(script) is None:
        line = shlex.join(("python", *command))
        raise CommandError(f"{script}: expected a command. Write: perdure drill -- {line}")
    checked_command(command, "perdure drill --")
    for path in options.read_only:
        # A misspelt directory would be redirected, and the program would begin without it.
        if not Path(path).is_dir():
            raise LaunchError(
                f"--read-only {path}: no such directory, in {Path.cwd()}. Expected a run directory "
                f"that the program only reads."
            )
    of_groups = [kind for kind in options.faults if kind in ("worker-lost", "other-workers")]
    if options.workers == 1:
        _require_possible(possible_kinds(Observed(steps=(1, 2)), of_groups)[1])


def _require_possible(cannot: Mapping[str, str]) -> None:
    if cannot:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in cannot.items())
        raise LaunchError(f"these faults cannot happen to this program: {reasons}.")


@dataclass
class _Drill:
    program: DrilledProgram
    options: DrillOptions
    directory: Path
    progress: Progress
    ends: Mapping[str, int] = field(default_factory=dict)
    """The newest steps that an undisturbed run leaves."""

    def run(self) -> DrillReport:
        report = DrillReport(self.program.command, self.options, Observed(), Outcome())
        began = time.monotonic()
        report.began = time_text(time.time())
        try:
            self._drill(report)
        except KeyboardInterrupt as error:
            report.stopped = True
            raise DrillStopped(report) from error
        finally:
            report.seconds = time.monotonic() - began
        return report

    def _drill(self, report: DrillReport) -> None:
        report.plain = plain = self._undisturbed("undisturbed-1", "undisturbed")
        _require_saves(plain)
        other = self._undisturbed("undisturbed-2", "undisturbed once more")
        exports = stable_exports(plain, other)
        for outcome in (plain, other):
            outcome.hash_exports(exports)
        # The second run finds compiled programs and warm caches, as the faulted runs do.
        report.observed = observed = observe(self.program, other)
        _, report.undisturbed = compare(plain, other)
        second = self.directory / "undisturbed-2"
        self.ends = newest_steps(second)
        if report.undisturbed is None:
            report.undisturbed = read_back(second, self.ends, plain)
        probes = Probes(self.program, self.directory / "probes", plain, observed, self.progress)
        if report.undisturbed is not None:
            self.progress("looking for the cause", None)
            report.diagnosis = diagnose_undisturbed(probes, other, report.undisturbed)
            return
        observed = self._with_phases(self._try_topologies(probes, observed, report), plain)
        report.observed = probes.observed = observed
        kinds = self._kinds(observed, report)
        scenarios = plan(observed, kinds, self.options.runs, self.options.seed)
        self.progress(_estimate(scenarios, observed), None)
        for scenario in scenarios:
            row = self._faulted(scenario, observed, plain)
            report.rows.append(row)
            self.progress(scenario.kind, row)
            if self.options.fail_fast and row.verdict != "pass":
                break
        _require_restores(report.rows)
        self._diagnose(probes, report)

    def _with_phases(self, observed: Observed, plain: Outcome) -> Observed:
        """Watch which lines run, in a run of its own: a compiler may leave out what is watched."""
        self.progress("undisturbed, watched for its phases", None)
        directory = self.directory / "undisturbed-3"
        watched = execute(self.program, directory, asked={"phases": True})
        _remove_checkpoints(directory)
        if watched.problem:
            return observed
        phases = phases_of(replace(watched, commits=plain.commits))
        numbers = zip(observed.runs, observed.sequence, strict=True)
        return replace(observed, phases=tuple(phases.get(number) for number in numbers))

    def _undisturbed(self, name: str, what: str) -> Outcome:
        self.progress(what, None)
        outcome = execute(self.program, self.directory / name)
        if outcome.problem:
            reached = [event["step"] for event in outcome.events if event["e"] == "step"]
            when = f"after step {max(reached)}" if reached else "before its first step"
            first = outcome.attempts[0].ended
            raise LaunchError(
                f"the program fails without any fault, {when} ({first}), so there is nothing to "
                f"drill. Repair this first; the end of its log:\n{outcome.log or '(nothing)'}"
            )
        return outcome

    def _try_topologies(self, probes: Probes, observed: Observed, report: DrillReport) -> Observed:
        """Try other numbers of devices and workers; one that is refused is no failure."""
        may: dict[str, tuple[int, ...]] = {}
        for what, counts in other_topologies(observed).items():
            kind, usable = f"other-{what}", []
            for count in counts[:2] if kind in (self.options.faults or KINDS) else ():
                self.progress(f"trying {count} {what}", None)
                if problem := probes.undisturbed(**{what: count}).problem:
                    report.impossible[kind] = f"refused on {count} {what}: {problem}"
                else:
                    usable.append(count)
            may[what] = tuple(usable)
        return replace(observed, may_devices=may["devices"], may_workers=may["workers"])

    def _kinds(self, observed: Observed, report: DrillReport) -> list[str]:
        wanted = self.options.faults or tuple(KINDS)
        kinds, cannot = possible_kinds(observed, wanted)
        report.impossible = {kind: report.impossible.get(kind, why) for kind, why in cannot.items()}
        if self.options.faults:
            _require_possible(report.impossible)
        return kinds

    def _faulted(self, scenario: Scenario, observed: Observed, plain: Outcome) -> DrillRow:
        """Run one scenario; while its fault does not fire, draw it again at earlier places."""
        retry = 0
        while True:
            name = f"run-{scenario.number:03d}{f'-{retry}' if retry else ''}"
            directory = self.directory / name
            outcome = execute(self.program, directory, scenario.attempts, observed.limits)
            if scenario.kind not in _OTHER_CLOCKS:  # an export may have a date
                outcome.hash_exports(plain.exports)
            compared, difference = compare(plain, outcome)
            if difference is not None and difference.is_of_export:
                # Negative control: two undisturbed runs may have had the same date, or second.
                control = self._undisturbed(f"{name}-control", "undisturbed, to compare its files")
                known = set(plain.exports)
                plain.hash_exports(known.intersection(stable_exports(plain, control)))
                _remove_checkpoints(self.directory / f"{name}-control")
                compared, difference = compare(plain, outcome)
            if difference is None and not outcome.problem:
                difference = read_back(directory, self.ends, plain) or compare_best(
                    self.directory / "undisturbed-2", directory, plain
                )
            row = DrillRow(scenario, outcome, compared, difference)
            if row.verdict == "pass":
                _remove_checkpoints(directory)
            retry += 1
            if row.verdict != "not fired" or retry == TRIES:
                return row
            scenario = draw_scenario(
                observed, scenario.kind, scenario.number, self.options.seed, retry
            )

    def _diagnose(self, probes: Probes, report: DrillReport) -> None:
        """Diagnose the first row of each sort of failure; a later one may have another cause."""
        known: dict[tuple[object, ...], int] = {}
        for row in report.rows:
            if row.verdict not in ("differs", "failed"):
                continue
            seen, special = row.difference, row.scenario.kind in _OWN_PROBES
            sort = (
                row.verdict,
                row.scenario.kind if special else "",
                seen and (bool(seen.unreadable), tuple(leaf.path for leaf in seen.leaves)),
                # Without a leaf, the runs do not end alike, and the text is all that is known. It may
                # have the path of the run.
                _NUMBER.sub("", row.outcome.problem)
                if seen is None
                else seen.what
                if not seen.leaves
                else "",
            )
            if (first := known.get(sort)) is not None:
                how = (
                    "the same leaves differ" if seen and seen.leaves else "it ends in the same way"
                )
                text = f"like run {first}: {how}; its cause was not looked for"
                row.diagnosis = replace(diagnosis("not looked for"), what=text)
                continue
            known[sort] = row.scenario.number
            self.progress(f"looking for the cause of run {row.scenario.number}", None)
            row.diagnosis = diagnose_run(probes, row.scenario, row.outcome, seen)


def _estimate(scenarios: Sequence[Scenario], observed: Observed) -> str:
    seconds = estimated_seconds(scenarios, observed)
    text = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{counted(len(scenarios), 'faulted run')}, about {text} without a search for causes"


def _require_saves(outcome: Outcome) -> None:
    """Raise `LaunchError` if the program saved no checkpoint."""
    opened = sorted({event["name"] for event in outcome.events if event["e"] == "open"})
    if not opened:
        raise LaunchError(
            "the program never opened a run directory, so there is nothing to compare. Expected a "
            "perdure.CheckpointManager(directory), a Trainer, or a Keras callback of perdure in it."
        )
    if not outcome.commits:
        raise LaunchError(
            f"the program opened {', '.join(opened)} and never saved a checkpoint. Expected "
            f"manager.save(step, state) in its loop, with a save_interval_steps below its steps."
        )


def _require_restores(rows: Sequence[DrillRow]) -> None:
    """Raise `LaunchError` if the program was restarted after checkpoints and never restored one."""
    resumed = [
        attempt.restored
        for row in rows
        for number, attempt in enumerate(row.outcome.attempts, 1)
        if attempt.first is not None
        and any(c.attempt < number and c.step > 0 for c in row.outcome.commits)
    ]
    if not resumed or any(resumed):
        return
    hint = (
        "Expected manager.restore_or_initialize(state) before its loop, and nothing before it that "
        "removes the run directory."
    )
    for row in rows:
        opened = [event for event in row.outcome.events if event["e"] == "open"]
        first = {event["name"] for event in opened if event["a"] == 1}
        if first and (others := sorted({event["name"] for event in opened} - first)):
            hint = (
                f"Started again, it opened {', '.join(others)}, and not the run directory of its "
                f"first start: expected the same name at each start."
            )
    raise LaunchError(
        f"the program saves checkpoints and never restores one: started again {len(resumed)} "
        f"times, it began from the first step. {hint}"
    )


def _remove_checkpoints(directory: Path) -> None:
    """Keep the small files: the events and the logs."""
    for path in directory.iterdir():
        if path.is_dir() and path.name != LOGS:
            shutil.rmtree(path)
