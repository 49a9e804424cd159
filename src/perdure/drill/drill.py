"""The drill itself: two undisturbed runs, then faulted ones, each compared; then why they differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perdure.drill.compare import RunDifference, compare, held, read_back
from perdure.drill.diagnose import (
    Diagnosis,
    ProbeRunner,
    diagnose_run,
    diagnose_undisturbed,
)
from perdure.drill.execution import LOGS, DrilledProgram, execute, observe
from perdure.drill.fault_plan import (
    KINDS,
    other_devices,
    other_workers,
    plan,
    possible,
    scenario,
)
from perdure.drill.scenario import Observed, Outcome, Scenario
from perdure.errors import LaunchError
from perdure.supervise.cache import default_cache

TRIES = 4
"""How often a scenario is drawn anew until its fault fires."""


@dataclass(frozen=True)
class DrillOptions:
    """What is tried: `faults` by their names in `KINDS` (all that can happen, by default), `runs`
    faulted runs drawn from `seed`, on `workers` processes. `leave` are run directories that the
    program only reads, and that stay where they are."""

    faults: tuple[str, ...] = ()
    runs: int = 10
    seed: int = 0
    workers: int = 1
    leave: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.faults) - KINDS.keys()):
            raise LaunchError(
                f"faults: expected some of {', '.join(KINDS)}, found {', '.join(unknown)}."
            )
        for name in ("runs", "workers"):
            if getattr(self, name) < 1:
                raise LaunchError(f"{name}: expected at least 1, found {getattr(self, name)}.")


@dataclass
class DrillRow:
    """One faulted run. `verdict`: "pass", "differs", "failed" (it did not come to its end), or "not
    fired" (the fault never happened, so nothing is shown)."""

    scenario: Scenario
    outcome: Outcome
    compared: int
    difference: RunDifference | None
    diagnosis: Diagnosis | None = None

    @property
    def verdict(self) -> str:
        if self.difference is not None:
            return "differs"
        if self.outcome.problem:
            return "failed"
        return "pass" if self.fired else "not fired"

    @property
    def fired(self) -> bool:
        """Whether all its planned faults have happened; a run that fails before does not count."""
        return self.outcome.all_fired(self.scenario)


@dataclass
class DrillReport:
    """What a drill has found; `document` is what `--json` prints."""

    command: tuple[str, ...]
    options: DrillOptions
    observed: Observed
    plain: Outcome
    rows: list[DrillRow] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    undisturbed: RunDifference | None = None
    diagnosis: Diagnosis | None = None

    @property
    def passed(self) -> bool:
        """Whether everything that was tried came out with the same bits, and all faults fired."""
        return self.undisturbed is None and all(row.verdict == "pass" for row in self.rows)

    def document(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "command": list(self.command),
            "pass": self.passed,
            "seed": self.options.seed,
            "workers": self.options.workers,
            "undisturbed": {
                "seconds": round(self.observed.seconds, 3),
                "steps": len(self.observed.steps),
                "checkpoints": len(self.plain.commits),
                "fingerprint": _fingerprint(self.plain),
                "difference": _plain(self.undisturbed),
                "diagnosis": _plain(self.diagnosis),
            },
            "impossible": self.impossible,
            "faults": self._counts(),
            "runs": [self._row(row) for row in self.rows],
        }

    def _counts(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            each = counts.setdefault(row.scenario.kind, {"runs": 0, "fired": 0, "pass": 0})
            each["runs"] += 1
            each["fired"] += row.fired
            each["pass"] += row.verdict == "pass"
        return counts

    def _row(self, row: DrillRow) -> dict[str, Any]:
        outcome = row.outcome
        return {
            "run": row.scenario.number,
            "kind": row.scenario.kind,
            "planned": row.scenario.describe(),
            "faults": row.scenario.faults,
            "fired": outcome.fired,
            "all_fired": row.fired,
            "verdict": row.verdict,
            "attempts": [asdict(each) for each in outcome.attempts],
            "repeated_steps": outcome.repeated,
            "seconds": round(outcome.seconds, 3),
            "lost_seconds": round(max(0.0, outcome.seconds - self.observed.seconds), 3),
            "compared": row.compared,
            "fingerprint": _fingerprint(outcome),
            "problem": outcome.problem,
            "log": outcome.log,
            "difference": _plain(row.difference),
            "diagnosis": _plain(row.diagnosis),
        }


Tell = Callable[[str, "DrillRow | None"], None]
"""Told what happens now, and every faulted run once it is over."""


def run_drill(
    command: Sequence[str],
    options: DrillOptions,
    directory: Path,
    tell: Tell = lambda *_: None,
) -> DrillReport:
    """Drill `command` in `directory`, where the runs that differ are kept.

    Raises `LaunchError` where there is nothing to try: the command does not exist, fails without any
    fault, or saves nothing; and where `directory` cannot be written to or holds an earlier drill.
    """
    for path in options.leave:
        # One that is misspelt would be led elsewhere, and the program would begin without it.
        if not Path(path).is_dir():
            raise LaunchError(
                f"--leave {path}: no such directory, in {Path.cwd()}. Expected a run directory that "
                f"the program only reads."
            )
    # In the drill's own directory: the first run compiles, and the others show that this is as good.
    cache = None if default_cache() is None else directory / "compiled"
    program = DrilledProgram(
        tuple(command), options.workers, options.environment, options.leave, cache
    )
    return _Drill(program, options, directory, tell).run()


class _Drill:
    def __init__(
        self, program: DrilledProgram, options: DrillOptions, directory: Path, tell: Tell
    ) -> None:
        self._program = program
        self._options = options
        self._directory = directory
        self._tell = tell
        self._held: dict[str, int] = {}  # what an undisturbed run leaves

    def run(self) -> DrillReport:
        plain = self._undisturbed("undisturbed-1", "undisturbed")
        _require_saves(plain)
        other = self._undisturbed("undisturbed-2", "undisturbed once more")
        # The second one finds compiled programs and warm caches, as the faulted ones do.
        observed = observe(self._program, other)
        report = DrillReport(self._program.command, self._options, observed, plain)
        _, report.undisturbed = compare(plain, other)
        again = self._directory / "undisturbed-2"
        self._held = held(again)
        if report.undisturbed is None:
            report.undisturbed = read_back(again, self._held, plain)
        lab = ProbeRunner(self._program, self._directory / "probes", plain, observed)
        if report.undisturbed is not None:
            self._tell("looking for the cause", None)
            report.diagnosis = diagnose_undisturbed(lab, report.undisturbed)
            return report
        report.observed = observed = self._try_topologies(lab, observed, report)
        lab.observed = observed
        can = self._kinds(observed, report)
        options = self._options
        for each in plan(observed, can, options.runs, options.seed, report.impossible):
            row = self._faulted(each, observed, plain)
            report.rows.append(row)
            self._tell(each.kind, row)
        _require_restores(report.rows)
        self._diagnose(lab, report)
        return report

    def _undisturbed(self, name: str, what: str) -> Outcome:
        self._tell(what, None)
        outcome = execute(self._program, self._directory / name)
        if outcome.problem:
            reached = [event["step"] for event in outcome.events if event["e"] == "step"]
            when = f"behind step {max(reached)}" if reached else "before its first step"
            first = outcome.attempts[0].ended
            raise LaunchError(
                f"the program fails without any fault, {when} ({first}), so there is nothing to "
                f"drill. Mend this first; the end of its log:\n{outcome.log or '(nothing)'}"
            )
        return outcome

    def _try_topologies(
        self, lab: ProbeRunner, observed: Observed, report: DrillReport
    ) -> Observed:
        """Which other numbers of devices and workers the program takes; one that it refuses is no
        fault of a restart."""
        wanted = self._options.faults or tuple(KINDS)
        devices: list[int] = []
        workers: list[int] = []
        if "other-devices" in wanted:
            for count in other_devices(observed)[:2]:
                self._tell(f"trying {count} devices", None)
                if problem := lab.undisturbed(devices=count).problem:
                    report.impossible["other-devices"] = f"refused on {count} devices: {problem}"
                else:
                    devices.append(count)
        if "other-workers" in wanted:
            for count in other_workers(observed)[:2]:
                self._tell(f"trying {count} workers", None)
                if problem := lab.undisturbed(workers=count).problem:
                    report.impossible["other-workers"] = f"refused on {count} workers: {problem}"
                else:
                    workers.append(count)
        return replace(observed, may_devices=tuple(devices), may_workers=tuple(workers))

    def _kinds(self, observed: Observed, report: DrillReport) -> list[str]:
        wanted = self._options.faults or tuple(KINDS)
        can, cannot = possible(observed, wanted)
        report.impossible = {kind: report.impossible.get(kind, why) for kind, why in cannot.items()}
        if self._options.faults and cannot:
            reasons = "; ".join(f"{kind}: {why}" for kind, why in report.impossible.items())
            raise LaunchError(f"these faults cannot happen to this program: {reasons}.")
        return can

    def _faulted(self, drawn: Scenario, observed: Observed, plain: Outcome) -> DrillRow:
        """Run one scenario; drawn anew, at earlier places, as long as its fault does not fire."""
        again = 0
        while True:
            where = self._directory / f"run-{drawn.number:03d}{f'-{again}' if again else ''}"
            outcome = execute(self._program, where, drawn.attempts, observed)
            compared, difference = compare(plain, outcome)
            if difference is None and not outcome.problem:
                difference = read_back(where, self._held, plain)
            row = DrillRow(drawn, outcome, compared, difference)
            if row.verdict == "pass":
                _remove(where)
            again += 1
            if row.verdict != "not fired" or again == TRIES:
                return row
            drawn = scenario(observed, drawn.kind, drawn.number, self._options.seed, again)

    def _diagnose(self, lab: ProbeRunner, report: DrillReport) -> None:
        """One diagnosis for the first of each sort; faults of one sort have one cause."""
        known: dict[tuple[str, ...], Diagnosis] = {}
        for row in report.rows:
            if row.verdict not in ("differs", "failed"):
                continue
            special = row.scenario.kind in ("other-devices", "other-workers", "clock-jump")
            leaves = row.difference.leaves if row.difference is not None else ()
            unreadable = row.difference is not None and bool(row.difference.unreadable)
            sort = (
                row.verdict,
                "unreadable" * unreadable,
                row.scenario.kind if special else "",
                *(p.path for p in leaves),
            )
            if sort not in known:
                self._tell("looking for the cause", None)
                known[sort] = diagnose_run(lab, row.scenario, row.outcome, row.difference)
            row.diagnosis = known[sort]


def _require_saves(outcome: Outcome) -> None:
    """Raise `LaunchError` that says what is missing, for a program that no drill can help."""
    opened = sorted({event["name"] for event in outcome.events if event["e"] == "open"})
    if not opened:
        raise LaunchError(
            "the program never opened a run directory, so it saves nothing that could be compared. "
            "Expected a perdure.CheckpointManager(directory), a Trainer, or a Keras callback of "
            "perdure in it."
        )
    if not outcome.commits:
        raise LaunchError(
            f"the program opened {', '.join(opened)} and never saved a checkpoint. Expected "
            f"manager.save(step, state) in its loop, with a save_interval_steps below its steps."
        )


def _require_restores(rows: Sequence[DrillRow]) -> None:
    """Raise `LaunchError` where the program was started behind a checkpoint, often, and took none."""
    resumed = [
        started.restored
        for row in rows
        for number, started in enumerate(row.outcome.attempts, 1)
        if started.first is not None and any(c.attempt < number for c in row.outcome.commits)
    ]
    if resumed and all(step is None for step in resumed):
        raise LaunchError(
            f"the program saves checkpoints and never restores one: started again {len(resumed)} "
            f"times, it began anew. Expected manager.restore_or_initialize(state) before its loop."
        )


def _remove(where: Path) -> None:
    """Keep what is small: the events and the logs."""
    for each in where.iterdir():
        if each.is_dir() and each.name != LOGS:
            shutil.rmtree(each)


def _fingerprint(outcome: Outcome) -> str | None:
    ends = [commit.fingerprint for _, commit in sorted(outcome.end().items())]
    return " ".join(ends) or None


def _plain(value: RunDifference | Diagnosis | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
