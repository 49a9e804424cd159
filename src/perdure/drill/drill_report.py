"""The options of a drill, and its report: one document, and its form in a terminal."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perdure.drill.causes import Diagnosis
from perdure.drill.compare import RunDifference
from perdure.drill.fault_plan import KINDS
from perdure.drill.observed import Observed
from perdure.drill.scenario import Outcome, Scenario
from perdure.errors import LaunchError
from perdure.text import counted, few

LIMIT_OF_CLOCKS = (
    'clocks that native code reads do not jump: np.datetime64("now"), pandas.Timestamp.now(), those of '
    "other processes, the times of files"
)


@dataclass(frozen=True)
class DrillOptions:
    """What a drill tries; LaunchError for values that cannot be.

    `faults` are names of `KINDS` (all that can happen if empty), `runs` those besides the restores
    that every drill tries. Run directories in `read_only` are left where they are. `environment`
    comes on top of this process's.
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
        return len(self.outcome.fired) >= len(self.scenario.planned)


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
        for kind, count in self._counts().items():
            if not count["fired"]:
                reasons[kind] = "it never fired as planned"
            elif not count["restored"]:
                reasons[kind] = "no run with it continued from a checkpoint"
        return reasons

    def document(self) -> dict[str, Any]:
        """The report in plain values, as `--json` prints it."""
        steps = [step for row in self.rows for step in row.outcome.restored_steps]
        restored = sum(bool(row.outcome.restored_steps) for row in self.rows)
        tried = self._tried()
        opened = [event for event in self.plain.events if event["e"] == "open"]
        redirected = {event["name"] for event in opened if event.get("redirected")}
        return {
            "command": list(self.command),
            "pass": self.passed,
            "stopped": self.stopped,
            "restored": {"runs": restored, "of": len(self.rows), "steps": sorted(set(steps))},
            "tried": tried,
            "not_tested": self.not_tested,
            "exports": sorted(self.plain.exports),
            "not_looked_at": self._not_looked_at(*tried["checkpoints"]),
            "limits": [
                *(
                    f"{name} is a URL, an absolute path, or outside of the working directory: it was "
                    f"redirected, and if the program looks there itself, it sees what is really there"
                    for name in sorted(redirected)
                ),
                LIMIT_OF_CLOCKS,
            ],
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
        """How many checkpoints, phases and kinds were tried, of how many there are."""
        seen = self.observed
        restored = {a.restored for row in self.rows for a in row.outcome.attempts if a.restored}
        phases = [(seen.phase(n), step) for n, step in enumerate(seen.sequence, 1) if step > 0]
        kinds = {row.scenario.kind for row in self.rows} - self.not_tested.keys()
        return {
            "checkpoints": [len(restored & seen.commits), len(seen.commits - {0})],
            "phases": [
                len({phase for phase, step in phases if step in restored}),
                len({phase for phase, _ in phases}),
            ],
            "kinds": [len(kinds), len(KINDS)],
        }

    def _not_looked_at(self, tried: int, known: int) -> list[str]:
        """What a pass says nothing about."""
        files = self.plain.files.items()
        exports = {name for name, file in files if file.is_export and not file.is_outside}
        outside = {name for name, file in files if file.is_outside}
        found = {
            "files outside of the working directory, which each run writes": outside,
            "files that it also writes while it trains": {*dict(files)} - exports - outside,
            "files whose bytes differ without a fault": exports - self.plain.exports.keys(),
        }
        others = [f"{known - tried} other checkpoints"] if tried < known else []
        named = [f"{what} ({few(sorted(names))})" for what, names in found.items() if names]
        return [*others, *named, "what it prints", "clocks that native code reads"]

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
        outcome, planned = row.outcome, row.scenario.planned
        return {
            "number": row.scenario.number,
            "kind": row.scenario.kind,
            "planned": ", ".join(planned),
            "place": row.scenario.place,
            "faults": len(planned),
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


def _fingerprint(outcome: Outcome) -> str | None:
    ends = [commit.fingerprint for _, commit in sorted(outcome.end().items())]
    return " ".join(ends) or None


def _plain(value: RunDifference | Diagnosis | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


# ---------------------------------------------------------------- in a terminal

_STYLE = {"pass": "green", "differs": "bold red", "failed": "bold red", "not fired": "yellow"}
_MOST_LEAVES = 8
_MOST_STEPS = 12


class TextReporter:
    """Prints to `console`; a quiet console prints nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = 0

    def progress(self, what: str, row: DrillRow | None) -> None:
        """Print what begins now, or a faulted run that is over."""
        if row is None:
            self._console.print(f"[dim]{escape(what)} ...[/dim]")
            return
        self._done += 1
        fired = describe_fired(row.outcome.fired, len(row.scenario.planned))
        style, steps = _STYLE[row.verdict], row.outcome.restored_steps
        restored = f"; restored step {', '.join(map(str, steps))}" if steps else ""
        self._console.print(
            f"{self._done:>4} [{style}]{row.verdict:<9}[/{style}] {what:<20} "
            f"{escape(fired)}{restored}"
        )

    def summary(self, document: Mapping[str, Any]) -> None:
        """Print the table of faults, the differences with their causes, and the verdict."""
        console = self._console
        if document["runs"]:
            console.print(_table(document))
        for kind, why in sorted(document["not_tested"].items()):
            console.print(f"[dim]not tested: {kind}: {escape(why.splitlines()[0])}[/dim]")
        for limit in document["limits"]:
            console.print(f"[dim]limit: {escape(limit)}[/dim]")
        plain = document["undisturbed"]
        if plain["difference"]:
            console.print("[bold red]two undisturbed runs differ[/bold red]")
            _explain(console, plain)
        explained: set[str] = set()
        for run in document["runs"]:
            diagnosis = run["diagnosis"] or {"cause": ""}
            if run["verdict"] in ("pass", "not fired") or str(diagnosis) in explained:
                continue
            explained |= {str(diagnosis)} if run["diagnosis"] else set()
            fired = escape(describe_fired(run["fired"], run["faults"]))
            console.print(f"[bold red]run {run['number']}[/bold red] ({fired})")
            if diagnosis["cause"] == "not looked for":
                console.print(f"  {escape(diagnosis['what'])}")
            else:
                _explain(console, run)
        console.print(verdict(document))


def describe_fired(fired: Sequence[str], faults: int) -> str:
    """The faults that fired in a run, and how many were planned if some did not."""
    text = "; ".join(fired) or "nothing fired"
    return text if len(fired) >= faults else f"{text} ({len(fired)} of {faults} planned)"


def verdict(document: Mapping[str, Any]) -> str:
    """The verdict of a report in one line."""
    runs = document["runs"]
    good = sum(run["verdict"] == "pass" for run in runs)
    if document["stopped"]:
        so_far = f"{good} of {counted(len(runs), 'faulted run')} so far end with the same bits"
        return f"STOPPED: the drill is not over; {so_far}"
    if document["pass"]:
        fired = sum(len(run["fired"]) for run in runs)
        end = (document["undisturbed"]["fingerprint"] or "")[:16]
        exports = document["exports"]
        also = f", and {few(exports)} the same bytes" if exports else ""
        kinds = "{} of {} kinds".format(*document["tried"]["kinds"])
        return (
            f"PASS: {counted(good, 'faulted run')}, {counted(fired, 'fault')} of {kinds} fired, "
            f"{restored_text(document)}; every checkpoint and every end has the "
            f"fingerprint of the undisturbed run ({end}){also}. Not looked at: "
            f"{'; '.join(document['not_looked_at'])}"
        )
    if document["undisturbed"]["difference"]:
        return "FAIL: two runs without any fault end with different bits"
    if not document["restored"]["runs"] and good == len(runs):
        return (
            f"FAIL: {restored_text(document)}: in no run did the program continue from a checkpoint "
            f"above step 0 and do another step, so nothing is proved. Save before the last step "
            f"(save_interval_steps)."
        )
    silent = sum(not run["all_fired"] for run in runs)
    unfired = f", {silent} whose faults did not all fire" if silent else ""
    return (
        f"FAIL: {good} of {counted(len(runs), 'faulted run')} end with the same bits{unfired}; "
        f"{restored_text(document)}"
    )


def restored_text(document: Mapping[str, Any]) -> str:
    """In how many runs a checkpoint was restored, from which of them, and in which phases."""
    restored, tried = document["restored"], document["tried"]
    runs = f"restored in {restored['runs']} of {counted(restored['of'], 'run')}"
    if not restored["steps"]:
        return runs
    phases = " in {} of {} phases".format(*tried["phases"]) if tried["phases"][1] > 1 else ""
    steps = few(restored["steps"], _MOST_STEPS)
    return f"{runs}, from {{}} of {{}} checkpoints{phases}: steps {steps}".format(
        *tried["checkpoints"]
    )


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("fault", no_wrap=True)
    for column in ("runs", "fired", "restored", "same bits", "attempts", "repeated", "lost s"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, counts in sorted(document["faults"].items()):
        runs = [run for run in document["runs"] if run["kind"] == kind]
        table.add_row(
            kind,
            str(counts["runs"]),
            str(counts["fired"]),
            str(counts["restored"]),
            str(counts["pass"]),
            str(sum(len(run["attempts"]) for run in runs)),
            str(sum(run["repeated_steps"] for run in runs)),
            f"{sum(run['lost_seconds'] for run in runs):.1f}",
        )
    return table


def _explain(console: Console, result: Mapping[str, Any]) -> None:
    """Print the first difference, its cause and the evidence."""
    if difference := result["difference"]:
        console.print(f"  first difference: {escape(difference['what'])}")
        for leaf in difference["leaves"][:_MOST_LEAVES]:
            console.print(
                f"    {escape(leaf['path'])}: expected {escape(leaf['expected'] or 'no such leaf')}, "
                f"found {escape(leaf['found'] or 'no such leaf')}"
            )
        if (more := len(difference["leaves"]) - _MOST_LEAVES) > 0:
            console.print(f"    and {more} more")
    if result.get("problem"):
        console.print(f"  {escape(result['problem'])}")
        for line in result["log"].splitlines():
            console.print(f"    [dim]{escape(line)}[/dim]")
    if diagnosis := result["diagnosis"]:
        console.print(f"  [bold]cause: {escape(diagnosis['what'])}[/bold] ({diagnosis['cause']})")
        for line in diagnosis["evidence"]:
            console.print(f"    - {escape(line)}")
        console.print(f"  to repair it: {escape(diagnosis['advice'])}")
