"""Two runs, checkpoint by checkpoint: the first step that differs, and its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.drill.execution import read_manifest
from perdure.drill.scenario import Commit, Outcome
from perdure.errors import PerdureError
from perdure.store import LocalStorage, Run
from perdure.store.contents import committed_steps
from perdure.store.drilled import RUNS
from perdure.store.format import MANIFESTS
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafRecord

Key = tuple[str, int]


@dataclass(frozen=True)
class LeafDifference:
    """One leaf; an empty side lacks it."""

    path: str
    expected: str
    found: str


@dataclass(frozen=True)
class RunDifference:
    """The first checkpoint that differs from the undisturbed run; `step` None: the end is missing.

    `leaves` differ, `equal` do not. `unreadable` says why the end, which was committed with the right
    bits, cannot be read from the disk any more.
    """

    what: str
    run: str
    step: int | None = None
    attempt: int = 0
    leaves: tuple[LeafDifference, ...] = ()
    equal: tuple[str, ...] = ()
    unreadable: str = ""


def reference(outcome: Outcome) -> dict[Key, Commit]:
    """The checkpoints of an undisturbed run."""
    return {(commit.run, commit.step): commit for commit in outcome.commits}


def compare(expected: Outcome, found: Outcome) -> tuple[int, RunDifference | None]:
    """How many checkpoints both have, and the first difference: of one of them, or of the end."""
    known = reference(expected)
    common = sorted(
        (commit for commit in found.commits if (commit.run, commit.step) in known),
        key=lambda commit: (commit.step, commit.attempt),
    )
    for commit in common:
        other = known[commit.run, commit.step]
        if commit.fingerprint != other.fingerprint:
            return len(common), _difference(other, commit)
    ends = found.end()
    for run, last in expected.end().items():
        if (end := ends.get(run)) is None or end.step != last.step:
            at = "no checkpoint" if end is None else f"step {end.step}"
            what = f"the end: expected step {last.step}, found {at}"
            return len(common), RunDifference(what, run)
    return len(common), None


def held(where: Path) -> dict[str, int]:
    """The newest step that each run directory of the drilled run in `where` says that it holds; one
    that the program has removed holds none."""
    found = {}
    for path in sorted((where / RUNS).glob(f"*/{MANIFESTS}")):
        if steps := committed_steps(LocalStorage(path.parent)):
            found[path.parent.name] = steps[-1]
    return found


def read_back(where: Path, wanted: Mapping[str, int], expected: Outcome) -> RunDifference | None:
    """Read what the drilled run in `where` has left, every byte of the newest checkpoints: those of
    `wanted`, with the bits that `expected` has recorded.

    A copy of a manifest shows what was committed, and only this shows that it can be restored. Older
    checkpoints and what was set aside may be damaged: the faults did that.
    """
    known, found = reference(expected), held(where)
    for run, step in wanted.items():
        if run not in found:
            why = "no checkpoint is left"
        elif found[run] != step:
            why = f"the newest that is left is step {found[run]}"
        else:
            try:
                manifest = Run(where / RUNS / run).load(step).manifest
            except PerdureError as error:
                why = str(error)
            else:
                commit = known.get((run, step))
                if commit is None or manifest.fingerprint == commit.fingerprint:
                    continue
                why = f"expected {commit.fingerprint}, found {manifest.fingerprint}"
        what = f"the end: step {step} was committed and cannot be read back: {why}"
        return RunDifference(what, run, unreadable=why)
    return None


def leaves_of(commit: Commit) -> dict[str, LeafRecord]:
    """The leaves of a checkpoint by their paths."""
    return {leaf.path: leaf for leaf in read_manifest(commit.copy, commit.step).leaves}


def _difference(expected: Commit, found: Commit) -> RunDifference:
    here, there = leaves_of(expected), leaves_of(found)
    changed = sorted(
        path for path in here.keys() | there.keys() if bits(here, path) != bits(there, path)
    )
    return RunDifference(
        what=f"step {found.step}: {len(changed)} of {len(here)} leaves differ",
        run=found.run,
        step=found.step,
        attempt=found.attempt,
        leaves=tuple(LeafDifference(p, _text(here.get(p)), _text(there.get(p))) for p in changed),
        equal=tuple(sorted(here.keys() - set(changed))),
    )


def changing(commits: Iterable[Commit], paths: Iterable[str]) -> list[str]:
    """Those of `paths` whose bits are not the same in all of `commits`."""
    seen: dict[str, set[object]] = {path: set() for path in paths}
    for commit in commits:
        held = leaves_of(commit)
        for path, found in seen.items():
            found.add(bits(held, path))
    return sorted(path for path, found in seen.items() if len(found) > 1)


def bits(leaves: Mapping[str, LeafRecord], path: str) -> object:
    """What two leaves must have in common to be equal; None where there is no such leaf."""
    leaf = leaves.get(path)
    return leaf and (leaf.dtype, leaf.shape, leaf.text, tuple(leaf.hashes()))


def _text(leaf: LeafRecord | None) -> str:
    if leaf is None:
        return ""
    data = memoryview((leaf.text or "").encode())
    said = Leaf(leaf.dtype, leaf.shape, data).describe()
    return said if leaf.text is not None or not leaf.hashes() else f"{said} {leaf.hashes()[0][:12]}"
