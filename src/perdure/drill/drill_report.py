"""The options of a drill, and its report: what was tried, what came of it, and what was not tested."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from perdure.drill.causes import Diagnosis
from perdure.drill.compare import RunDifference
from perdure.drill.fault_plan import KINDS
from perdure.drill.scenario import Observed, Outcome, Scenario
from perdure.errors import LaunchError
from perdure.text import few

LIMIT_OF_CLOCKS = (
    'clocks that native code reads do not jump: np.datetime64("now"), pandas.Timestamp.now(), those of '
    "other processes, the times of files"
)


@dataclass(frozen=True)
class DrillOptions:
    """What a drill tries.

    Attributes:
        faults: Names of `KINDS`; empty for all that can happen to the program.
        runs: How many faulted runs to try, besides the restores that every drill tries.
        seed: Decides the places and times of all faults.
        workers: Processes of the group.
        read_only: Run directories that the program only reads; they are left where they are.
        environment: Variables for the program, on top of those of this process.
        fail_fast: Stop at the first run that differs or fails.

    Raises:
        LaunchError: If a fault is not known, or `runs` or `workers` is below 1.
    """

    faults: tuple[str, ...] = ()
    runs: int = 10
    seed: int = 0
    workers: int = 1
    read_only: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    fail_fast: bool = False

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
    """One faulted run, compared with the undisturbed one."""

    scenario: Scenario
    outcome: Outcome
    compared: int
    difference: RunDifference | None
    diagnosis: Diagnosis | None = None

    @property
    def verdict(self) -> str:
        """ "pass", "differs", "failed" (it did not finish) or "not fired" (which proves nothing)."""
        if self.difference is not None:
            return "differs"
        if self.outcome.problem:
            return "failed"
        return "pass" if self.fired else "not fired"

    @property
    def fired(self) -> bool:
        """Whether all planned faults have happened; a run that fails before that does not count."""
        return self.outcome.all_fired(self.scenario)


@dataclass
class DrillReport:
    """The result of a drill."""

    command: tuple[str, ...]
    options: DrillOptions
    observed: Observed
    plain: Outcome
    rows: list[DrillRow] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    undisturbed: RunDifference | None = None
    diagnosis: Diagnosis | None = None
    began: str = ""
    seconds: float = 0.0
    stopped: bool = False

    @property
    def passed(self) -> bool:
        """Whether every run ended with the same bits, every fault fired, and a run was continued.

        A program that is only ever killed before its first checkpoint proves nothing.
        """
        restored = any(row.outcome.restored_steps for row in self.rows)
        equal = all(row.verdict == "pass" for row in self.rows)
        return self.undisturbed is None and equal and restored and not self.stopped

    @property
    def not_tested(self) -> dict[str, str]:
        """The kinds that this drill says nothing about, with the reason."""
        reasons = dict(self.impossible)
        for kind in dict.fromkeys(row.scenario.kind for row in self.rows):
            rows = [row for row in self.rows if row.scenario.kind == kind]
            if not any(row.fired for row in rows):
                reasons[kind] = "it never fired as planned"
            elif not any(row.outcome.restored_steps for row in rows):
                reasons[kind] = "no run with it continued from a checkpoint"
        return reasons

    def document(self) -> dict[str, Any]:
        """The report in plain values, as `--json` prints it."""
        return {
            "command": list(self.command),
            "pass": self.passed,
            "stopped": self.stopped,
            "restored": self._restored(),
            "tried": self._tried(),
            "not_tested": self.not_tested,
            "exports": sorted(self.plain.exports),
            "not_looked_at": self._not_looked_at(),
            "limits": [*map(_view, self._redirected()), LIMIT_OF_CLOCKS],
            "date": self.began,
            "seconds": round(self.seconds, 1),
            "host": f"{platform.node()} ({platform.platform()})",
            "versions": dict(self.observed.versions),
            "recipe": dict(self.observed.recipe),
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

    def _tried(self) -> dict[str, list[int]]:
        """How many checkpoints, phases and kinds of faults were tried, and how many there are.

        A checkpoint or phase counts as tried if the program was started again from it.
        """
        seen = self.observed
        restored = {a.restored for row in self.rows for a in row.outcome.attempts if a.restored}
        numbers = range(1, len(seen.sequence) + 1)
        phases = {number: seen.phase(number) for number in numbers if seen.sequence[number - 1] > 0}
        tried = {phases[number] for number in phases if seen.sequence[number - 1] in restored}
        kinds = {row.scenario.kind for row in self.rows} - self.not_tested.keys()
        return {
            "checkpoints": [len(restored & set(seen.commits)), len({*seen.commits} - {0})],
            "phases": [len(tried), len(set(phases.values()))],
            "kinds": [len(kinds), len(KINDS)],
        }

    def _not_looked_at(self) -> list[str]:
        """What a pass says nothing about."""
        files = self.plain.files
        outside = [name for name, file in files.items() if file.is_outside]
        found = {
            "files outside of the working directory, which each run writes": outside,
            "files that it also writes while it trains": [
                name for name, file in files.items() if not (file.is_export or file.is_outside)
            ],
            "files whose bytes differ without a fault": [
                name
                for name, file in files.items()
                if file.is_export and not file.is_outside and name not in self.plain.exports
            ],
        }
        tried, known = self._tried()["checkpoints"]
        others = [f"{known - tried} other checkpoints"] if tried < known else []
        named = [f"{what} ({few(sorted(names))})" for what, names in found.items() if names]
        return [*others, *named, "what it prints", "clocks that native code reads"]

    def _redirected(self) -> list[str]:
        opened = (event for event in self.plain.events if event["e"] == "open")
        return sorted({event["name"] for event in opened if event.get("redirected")})

    def _restored(self) -> dict[str, Any]:
        """In how many runs a checkpoint was restored and continued from, and from which steps."""
        steps = [step for row in self.rows for step in row.outcome.restored_steps]
        runs = sum(bool(row.outcome.restored_steps) for row in self.rows)
        return {"runs": runs, "of": len(self.rows), "steps": sorted(set(steps))}

    def _counts(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            start = {"runs": 0, "fired": 0, "restored": 0, "pass": 0}
            count = counts.setdefault(row.scenario.kind, start)
            count["runs"] += 1
            count["restored"] += bool(row.outcome.restored_steps)
            count["fired"] += row.fired
            count["pass"] += row.verdict == "pass"
        return counts

    def _row(self, row: DrillRow) -> dict[str, Any]:
        outcome = row.outcome
        return {
            "number": row.scenario.number,
            "kind": row.scenario.kind,
            "planned": row.scenario.describe(),
            "place": row.scenario.place,
            "faults": row.scenario.faults,
            "fired": outcome.fired,
            "all_fired": row.fired,
            "verdict": row.verdict,
            "attempts": [
                {**asdict(attempt), "recomputed": None if span is None else list(span)}
                for attempt, span in zip(outcome.attempts, outcome.recomputed, strict=True)
            ],
            "restored_steps": outcome.restored_steps,
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


class DrillStopped(KeyboardInterrupt):
    """The drill was asked to end; `report` holds the runs that were over."""

    def __init__(self, report: DrillReport) -> None:
        super().__init__("the drill was stopped")
        self.report = report


def _view(name: str) -> str:
    return (
        f"{name} is a URL, an absolute path, or outside of the working directory: it was redirected, "
        f"and if the program looks there itself, it sees what is really there"
    )


def _fingerprint(outcome: Outcome) -> str | None:
    ends = [commit.fingerprint for _, commit in sorted(outcome.end().items())]
    return " ".join(ends) or None


def _plain(value: RunDifference | Diagnosis | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
