"""What `diff` returns: the differences of two checkpoints, as fields, text and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perdure.look.leaf_diff import LeafDiff
from perdure.look.leaf_reader import ORIGIN
from perdure.look.tables import Shown, Table, plain, printable, size_text
from perdure.text import counted, few

MOST_PATHS = 20
_VALUE = 60


@dataclass(frozen=True)
class FieldDiff:
    """A field of a recipe, or a metric, with the value on both sides; None if one lacks it."""

    name: str
    first: str | int | float | bool | None
    second: str | int | float | bool | None


@dataclass(frozen=True)
class Rename:
    """A leaf that probably has another path on the second side, where the same bytes are."""

    first: str
    second: str


@dataclass(frozen=True, repr=False)
class CheckpointDiff(Shown):
    """What differs between two checkpoints.

    No chunk of `equal_leaves` was read. `changed` are on both sides with other bits, dtype or
    shape; `renames` probably have another path. `environment` are fields of the recipe about
    software and hardware. `process_leaves` that differ are no part of the state. `common`: if runs
    were compared, their common steps, and how many before this one are equal.
    """

    first: str
    second: str
    equal_leaves: int = 0
    equal_nbytes: int = 0
    changed: tuple[LeafDiff, ...] = ()
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    renames: tuple[Rename, ...] = ()
    recipe: tuple[FieldDiff, ...] = ()
    environment: tuple[FieldDiff, ...] = ()
    metrics: tuple[FieldDiff, ...] = ()
    process_leaves: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    read_nbytes: int = 0
    common: str = ""

    @property
    def equal(self) -> bool:
        """Whether the states, or the selected leaves, are equal: same paths, dtypes, shapes, bits."""
        return not (self.changed or self.only_first or self.only_second or self.renames)

    def as_dict(self) -> dict[str, Any]:
        """The differences for JSON."""
        return plain({"equal": self.equal, **asdict(self)})

    def _blocks(self) -> list[str | Table]:
        blocks: list[str | Table] = [f"A  {self.first}\nB  {self.second}"]
        if self.common:
            blocks.append(self.common)
        equal = counted(self.equal_leaves, "leaf", "leaves")
        blocks.append(
            f"{equal} equal ({size_text(self.equal_nbytes)}), {len(self.changed)} differ; "
            f"{size_text(self.read_nbytes)} read"
        )
        compared = [leaf for leaf in self.changed if leaf.problem is None]
        if compared:
            blocks.append(_figures(compared))
        if any(0 < leaf.compared < leaf.count for leaf in compared):
            blocks.append("rel. norm and cosine are those of the chunks that differ")
        blocks += [
            f"{leaf.path}: A {leaf.first}, B {leaf.second}: {leaf.problem}"
            for leaf in self.changed
            if leaf.problem is not None
        ]
        if self.renames:
            rows = [(each.first, each.second) for each in self.renames]
            blocks.append(Table(("probably renamed, the same bytes: A", "B"), rows))
        blocks += _only("A", self.only_first) + _only("B", self.only_second)
        named = {"recipe": self.recipe, "environment": self.environment, "metric": self.metrics}
        for title, fields in named.items():
            if fields:
                values = [(each.name, _value(each.first), _value(each.second)) for each in fields]
                blocks.append(Table((title, "A", "B"), values))
        if generators := len(self.process_leaves) - self.process_leaves.count(ORIGIN):
            count = counted(generators, "leaf", "leaves")
            verb, they = ("differs", "it is") if generators == 1 else ("differ", "they are")
            blocks.append(
                f"{count} of single processes (random generators) {verb}; {they} not part of the state"
            )
        if ORIGIN in self.process_leaves:
            blocks.append("the note on what a checkpoint was made from (average, import) differs")
        if self.containers:
            blocks.append(f"containers differ at {few(self.containers)}")
        blocks.append("equal" if self.equal else "different")
        return blocks


def _figures(leaves: Sequence[LeafDiff]) -> Table:
    header = ("leaf", "differ", "of", "first at", "A", "B", "ULP", "abs", "rel", "rel. norm")
    rows = [
        (
            leaf.path,
            leaf.differing,
            leaf.count,
            f"[{','.join(map(str, leaf.first_index))}]" if leaf.first_index else "",
            *_values(leaf),
            leaf.max_ulp,
            leaf.max_abs,
            leaf.max_rel,
            leaf.rel_norm,
            None if leaf.cosine is None else format(leaf.cosine, ".9f"),
            leaf.not_finite or None,
        )
        for leaf in leaves
    ]
    return Table((*header, "cosine", "NaN or inf"), rows)


def _values(leaf: LeafDiff) -> tuple[str, str]:
    """The first elements that differ; of scalars of two types with the types: `str 1` and `int 1`."""
    first, second = leaf.first_values or ("", "")
    if leaf.first != leaf.second:
        first, second = f"{leaf.first} {first}", f"{leaf.second} {second}"
    return printable(first, _VALUE), printable(second, _VALUE)


def _value(value: object) -> str:
    return "" if value is None else printable(str(value), _VALUE)


def _only(side: str, paths: Sequence[str]) -> list[str | Table]:
    lines: list[str | Table] = [f"only in {side}: {path}" for path in paths[:MOST_PATHS]]
    more = len(paths) - MOST_PATHS
    return [*lines, f"only in {side}: and {more:,} more"] if more > 0 else lines
