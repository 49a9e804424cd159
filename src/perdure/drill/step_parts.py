"""The parts of one step, in the order in which they are computed, and the first that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.drill.compare import LeafDifference

Part = tuple[str, int | None]
"""The name of a part, and the number of its logical replica (of the process, for generators)."""

Parts = Mapping[Part, Mapping[str, str]]
"""Digests of the leaves of each part of one step."""

PARTS = {
    "generators": "the random generators before the step",
    "draws": "the random generators after the step",
    "before": "the state before the step",
    "batch": "the batch",
    "key": "the random key",
    "contribution": "the contribution",
    "total": "the total of all replicas",
    "update": "the state that the update returned",
    "state": "the state after the step",
}
"""In the order of the computation. What a program has of them depends on how it computes a step."""


@dataclass(frozen=True)
class PartDifference:
    """The first part of a step that differs between two computations of it.

    Attributes:
        part: A name in `PARTS`.
        number: The first logical replica that differs; None if the part belongs to none.
        numbers: All that differ.
        of: How many replicas were compared.
        leaves: The leaves of the first one that differ, by path.
        equal: The parts before it that both have, and that are equal.
    """

    part: str
    number: int | None
    numbers: tuple[int, ...]
    of: int
    leaves: tuple[LeafDifference, ...]
    equal: tuple[str, ...]

    @property
    def name(self) -> str:
        """The part in words, with the logical replicas that differ."""
        text = PARTS[self.part]
        if self.number is None or self.part in _GENERATORS:
            return text
        if len(self.numbers) == self.of and self.of > 1:
            return f"{text} of every logical replica"
        shown = ", ".join(map(str, self.numbers[:8])) + (", ..." if len(self.numbers) > 8 else "")
        many = "s" if len(self.numbers) > 1 else ""
        return f"{text} of logical replica{many} {shown}"


_GENERATORS = ("generators", "draws")


def first_different_part(one: Parts, two: Parts) -> PartDifference | None:
    """The first part that both have and that differs; None for none.

    Generators of the process count only in a loop without a strategy, where nothing else says which
    random numbers a step has.

    Args:
        one: Digests of the leaves of each part.
        two: Those of the other computation.
    """
    has_keys = any(part == "key" for part, _ in one.keys() & two.keys())
    equal: list[str] = []
    for part in PARTS:
        if has_keys and part in _GENERATORS:
            continue
        if (found := _difference(part, one, two, tuple(equal))) is not None:
            return found
        if any(one[name, number] for name, number in one.keys() & two.keys() if name == part):
            equal.append(part)
    return None


def generators_that_differ(one: Parts, two: Parts) -> tuple[str, ...]:
    """The names of the generators from which both drew in the step, with different states."""
    found = _difference("generators", one, two, ())
    return () if found is None else tuple(leaf.path for leaf in found.leaves)


def _difference(part: str, one: Parts, two: Parts, equal: tuple[str, ...]) -> PartDifference | None:
    numbers = [number for name, number in one if name == part and (part, number) in two]
    different = [n for n in numbers if _leaves(part, one[part, n], two[part, n])]
    if not different:
        return None
    different.sort(key=lambda number: -1 if number is None else number)
    first = different[0]
    known = tuple(number for number in different if number is not None)
    leaves = _leaves(part, one[part, first], two[part, first])
    return PartDifference(part, first, known, len(numbers), leaves, equal)


def _leaves(
    part: str, one: Mapping[str, str], two: Mapping[str, str]
) -> tuple[LeafDifference, ...]:
    """The leaves that differ. Of generators only those count that both computations drew from."""
    paths = one.keys() & two.keys() if part == "generators" else one.keys() | two.keys()
    return tuple(
        LeafDifference(path, one.get(path, ""), two.get(path, ""))
        for path in sorted(paths)
        if one.get(path) != two.get(path)
    )
