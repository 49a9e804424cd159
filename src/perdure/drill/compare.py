"""Compares two runs checkpoint by checkpoint: the first step that differs, and its leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from perdure.checkpoint.address import read_manifests
from perdure.checkpoint.retention import candidates, ranked
from perdure.drill.fault_injection import RUNS
from perdure.drill.scenario import Commit, Outcome
from perdure.errors import PerdureError
from perdure.store import LocalStorage, Run
from perdure.store.format import MANIFESTS
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry
from perdure.store.names import committed_steps

Key = tuple[str, int]


@dataclass(frozen=True)
class LeafDifference:
    """One leaf that differs; the description of a missing leaf is empty."""

    path: str
    expected: str
    found: str


@dataclass(frozen=True)
class RunDifference:
    """The first checkpoint that differs from the undisturbed run; `unreadable` if its bits were
    right.

    `step` is None if the last checkpoint is missing. `attempt` wrote it.
    """

    what: str
    run: str
    step: int | None = None
    attempt: int = 0
    leaves: tuple[LeafDifference, ...] = ()
    unreadable: str = ""

    @property
    def is_of_export(self) -> bool:
        """Whether it is a file that the program makes after its last step, and no checkpoint."""
        return not self.run and bool(self.leaves)


def reference(outcome: Outcome) -> dict[Key, Commit]:
    """The checkpoints of a run by run directory and step."""
    return {(commit.run, commit.step): commit for commit in outcome.commits}


def compare(expected: Outcome, actual: Outcome) -> tuple[int, RunDifference | None]:
    """How many checkpoints both runs have, and the first difference: in a checkpoint, or at the end."""
    known, rules = reference(expected), _retained_by(expected)
    common = sorted(
        (commit for commit in actual.commits if (commit.run, commit.step) in known),
        key=lambda commit: (commit.step, commit.attempt),
    )
    for commit in common:
        other, what, leaves = known[commit.run, commit.step], "", ()
        if commit.fingerprint != other.fingerprint:
            old = other.leaves()
            leaves = leaf_differences(old, commit.leaves())
            what = f"{len(leaves)} of {len(old)} leaves differ"
        elif commit.run in rules:  # other metrics may be timings
            name = rules[commit.run]["metric"]
            values = [each.manifest().metrics.get(name) for each in (other, commit)]
            if values[0] != values[1]:
                what = f"the metric {name}, by which checkpoints are kept, differs"
                leaves = (LeafDifference(f"metric {name}", *map(repr, values)),)
        if what:
            text = f"step {commit.step}: {what}"
            found = RunDifference(text, commit.run, commit.step, commit.attempt, leaves)
            return len(common), found
    ends = actual.end()
    others = [run for run in ends if run not in expected.end()]
    for run, last in expected.end().items():
        if (end := ends.get(run)) is None or end.step != last.step:
            actual_end = "no checkpoint" if end is None else f"step {end.step}"
            if others:
                actual_end += f"; only this run has {', '.join(map(unquote, others))}"
            what = f"the end: expected step {last.step} in {unquote(run)}, found {actual_end}"
            return len(common), RunDifference(what, run)
    if others:
        what = f"the end: only this run has the run directory {unquote(others[0])}"
        return len(common), RunDifference(what, others[0])
    for name, bits in expected.exports.items() if actual.exports else ():
        if (found := actual.exports.get(name, "")) != bits:
            what = f"the end: {name}, which the program writes after its last step, differs"
            leaf = LeafDifference(f"file {name}", bits[:12], found[:12])
            return len(common), RunDifference(what, "", leaves=(leaf,))
    return len(common), None


def stable_exports(one: Outcome, two: Outcome) -> list[str]:
    """The files that two undisturbed runs make after their last step, with the same bytes."""
    names = [
        name
        for name, file in one.files.items()
        if file.is_export and not file.is_outside and name in two.files
    ]
    for each in (one, two):
        each.hash_exports(names)
    return [name for name in names if one.exports[name] == two.exports[name]]


def _retained_by(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """The rule of each run directory whose best checkpoints are kept by a metric."""
    return {event["run"]: event for event in outcome.events if event["e"] == "retention"}


def compare_best(plain: Path, faulted: Path, expected: Outcome) -> RunDifference | None:
    """Compare which checkpoints two drilled runs have kept at their ends because of a metric.

    If one that only a preempted run made may be among the best, the two are not comparable.
    """
    known = reference(expected)
    for run, rule in _retained_by(expected).items():
        old, new = (_best_steps(directory / RUNS / run, rule) for directory in (plain, faulted))
        if old != new and all((run, step) in known for step in new):
            texts = [", ".join(map(str, steps)) or "none" for steps in (old, new)]
            kept = f"expected {texts[0]}, found {texts[1]}"
            what = f"the end: kept for the metric {rule['metric']}: {kept}"
            best = LeafDifference(f"best by {rule['metric']}", *(f"step {text}" for text in texts))
            return RunDifference(what, run, leaves=(best,))
    return None


def _best_steps(directory: Path, rule: Mapping[str, Any]) -> list[int]:
    """The steps that a run directory keeps by its rule; unreadable manifests count as removed."""
    if not (directory / MANIFESTS).is_dir():
        return []
    manifests, *_ = read_manifests(Run(directory))
    best = ranked(candidates(manifests, ()), rule["metric"], rule["mode"])[: rule["keep"]]
    return sorted(candidate.step for candidate in best)


def newest_steps(directory: Path) -> dict[str, int]:
    """The newest step of each run directory that the drilled run in `directory` has left."""
    newest = {}
    for path in sorted((directory / RUNS).glob(f"*/{MANIFESTS}")):
        if steps := committed_steps(LocalStorage(path.parent)):
            newest[path.parent.name] = steps[-1]
    return newest


def read_back(
    directory: Path, wanted: Mapping[str, int], expected: Outcome
) -> RunDifference | None:
    """Read every byte of the newest checkpoints that the drilled run in `directory` has left.

    Returns the first that is missing, unreadable or not as `expected`; None for none. Only reading
    shows that it can be restored; older ones and those in quarantine may be damaged by the faults.
    """
    known, newest = reference(expected), newest_steps(directory)
    for run, step in wanted.items():
        if run not in newest:
            why = "no checkpoint is left"
        elif newest[run] != step:
            why = f"the newest that is left is step {newest[run]}"
        else:
            try:
                manifest = Run(directory / RUNS / run).load(step).manifest
            except PerdureError as error:
                why = str(error)
            else:
                commit = known.get((run, step))
                if commit is None or manifest.fingerprint == commit.fingerprint:
                    continue
                why = f"expected {commit.fingerprint[:16]}, found {manifest.fingerprint[:16]}"
        what = f"the end: step {step} was committed and cannot be read back: {why}"
        return RunDifference(what, run, unreadable=why)
    return None


def leaf_differences(
    old: Mapping[str, LeafEntry], new: Mapping[str, LeafEntry]
) -> tuple[LeafDifference, ...]:
    """The leaves that differ, scalars and schedules first: a weight may be their consequence."""
    changed = sorted(
        (path for path in old.keys() | new.keys() if bits_of(old, path) != bits_of(new, path)),
        key=lambda path: ((old.get(path) or new[path]).nbytes, path),
    )
    return tuple(LeafDifference(p, _text(old.get(p)), _text(new.get(p))) for p in changed)


def bits_of(leaves: Mapping[str, LeafEntry], path: str) -> object:
    """A value that is the same for two leaves with the same bits; None for a missing leaf."""
    leaf = leaves.get(path)
    return leaf and leaf.bits


def _text(leaf: LeafEntry | None) -> str:
    if leaf is None:
        return ""
    data = memoryview((leaf.text or "").encode())
    text = Leaf(leaf.dtype, leaf.shape, data).describe()
    return text if leaf.text is not None or not leaf.hashes() else f"{text} {leaf.hashes()[0][:12]}"
