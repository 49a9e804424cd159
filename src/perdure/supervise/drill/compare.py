"""Two runs, checkpoint by checkpoint: the first step that differs, and its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perdure.store.format import LeafRecord
from perdure.store.leaf import Leaf
from perdure.supervise.drill.attempt import read_manifest
from perdure.supervise.drill.scenario import Commit, Outcome

Key = tuple[str, int]


@dataclass(frozen=True)
class LeafDifference:
    """One leaf; an empty side lacks it."""

    path: str
    expected: str
    found: str


@dataclass(frozen=True)
class Difference:
    """The first checkpoint that differs from the undisturbed run; `step` None: the end is missing.

    `leaves` differ, `equal` do not.
    """

    what: str
    run: str
    step: int | None = None
    attempt: int = 0
    leaves: tuple[LeafDifference, ...] = ()
    equal: tuple[str, ...] = ()


def reference(outcome: Outcome) -> dict[Key, Commit]:
    """The checkpoints of an undisturbed run."""
    return {(commit.run, commit.step): commit for commit in outcome.commits}


def compare(expected: Outcome, found: Outcome) -> tuple[int, Difference | None]:
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
            return len(common), Difference(what, run)
    return len(common), None


def leaves_of(commit: Commit) -> dict[str, LeafRecord]:
    """The leaves of a checkpoint by their paths."""
    return {leaf.path: leaf for leaf in read_manifest(commit.copy, commit.step).leaves}


def _difference(expected: Commit, found: Commit) -> Difference:
    here, there = leaves_of(expected), leaves_of(found)
    changed = sorted(
        path for path in here.keys() | there.keys() if bits(here, path) != bits(there, path)
    )
    return Difference(
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
