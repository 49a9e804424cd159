"""How two leaves of one dtype and shape differ, from the chunks that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from perdure.look.leaf_reader import KEY_PREFIX, ORIGIN, describe, element_shape, scalar_value
from perdure.look.numerics import (
    Array,
    as_float64,
    bits,
    blocks,
    cosine,
    integer_distance,
    is_integer,
    parts_dtype,
    product_sum,
    root_ratio,
    ulp_distance,
)
from perdure.look.tables import Shown, Table, plain, printable, size_text
from perdure.store.manifest import LeafEntry
from perdure.text import counted, few


@dataclass(frozen=True)
class LeafDiff:
    """How a leaf differs. Figures that have no meaning for it are None.

    `compared` are the elements in chunks that differ, `differing` those with other bits (-0.0 is
    not 0.0). `not_finite` pairs do not count in `max_ulp`, `max_abs`, `max_rel` (by the larger
    absolute value), `rel_norm` (by the norm of the first side) and `cosine`, where a complex number
    counts as two. `problem`: why elements were not compared.
    """

    path: str
    first: str
    second: str
    count: int = 1
    compared: int = 0
    differing: int | None = None
    first_index: tuple[int, ...] | None = None
    first_values: tuple[str, str] | None = None
    not_finite: int | None = None
    max_ulp: int | None = None
    max_abs: float | int | None = None
    max_rel: float | None = None
    rel_norm: float | None = None
    cosine: float | None = None
    problem: str | None = None


class Comparison:
    """Compares the elements of two leaves of one dtype and shape, a chunk at a time."""

    def __init__(self, entry: LeafEntry) -> None:
        self._entry = entry
        self._shape = element_shape(entry)
        self._keys = entry.dtype.startswith(KEY_PREFIX)
        self._compared = self._differing = self._not_finite = 0
        self._first: tuple[int, str, str] | None = None
        self._ulp: int | None = None
        self._abs: float | int | None = None
        self._rel: float | None = None
        # Sums over pairs: of squared differences, of squares of each side, of products.
        self._distance = self._squares = self._other_squares = self._products = 0.0

    def add(self, start: int, first: Array, second: Array) -> None:
        """Compare the elements from number `start` on, one-dimensional on both sides."""
        with np.errstate(over="ignore", under="ignore"):
            for x, y in blocks(first, second):
                self._add_block(start, x, y)
                start += x.size

    def result(self) -> LeafDiff:
        """What was found."""
        index, texts = None, None
        if self._first is not None:
            number, *values = self._first
            index = tuple(map(int, np.unravel_index(number, self._shape))) if self._shape else ()
            texts = values[0], values[1]
        described = describe(self._entry)
        found = LeafDiff(
            self._entry.path,
            described,
            described,
            count=math.prod(self._shape),
            compared=self._compared,
            differing=self._differing,
            first_index=index,
            first_values=texts,
            not_finite=None if self._keys else self._not_finite,
            max_ulp=self._ulp,
            max_abs=self._abs,
            max_rel=self._rel,
        )
        if self._abs is None:
            return found
        return replace(
            found,
            rel_norm=root_ratio(self._distance, self._squares),
            cosine=cosine(self._products, self._squares, self._other_squares),
        )

    def _add_block(self, start: int, x: Array, y: Array) -> None:
        dtype = parts_dtype(x.dtype)
        x_parts, y_parts = x.view(dtype), y.view(dtype)
        differs = bits(x_parts) != bits(y_parts)
        elements = differs if dtype == x.dtype else differs.reshape(-1, 2).any(axis=1)
        self._compared += x.size
        if count := int(np.count_nonzero(elements)):
            self._differing += count
            if self._first is None:
                place = int(np.argmax(elements))
                self._first = (start + place, *_value_texts(x[place], y[place]))
        if not self._keys:
            self._measure(x_parts, y_parts, differs)

    def _measure(self, x: Array, y: Array, differs: Array) -> None:
        same = not differs.any()
        a = as_float64(x)
        b = a if same else as_float64(y)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            self._not_finite += int(np.count_nonzero(differs & ~finite))
            numbers = ~(np.isnan(a) | np.isnan(b))
            self._steps(x[differs & numbers], y[differs & numbers])
            x, y, a, b, differs = x[finite], y[finite], a[finite], b[finite], differs[finite]
        if not a.size:
            return
        self._abs = self._abs or 0
        squares = product_sum(a, a)
        self._squares += squares
        self._other_squares += squares if same else product_sum(b, b)
        self._products += squares if same else product_sum(a, b)
        if not differs.any():
            return
        x, y, a, b = x[differs], y[differs], a[differs], b[differs]
        self._steps(x, y)
        distance = b - a
        larger = np.maximum(np.abs(a), np.abs(b))
        relative = np.abs(distance) / np.where(larger > 0, larger, 1.0)
        self._rel = max(self._rel or 0.0, float(relative.max()))
        self._distance += product_sum(distance, distance)
        exact = is_integer(x.dtype)
        largest = integer_distance(x, y) if exact else float(np.abs(distance).max())
        self._abs = max(self._abs, largest)

    def _steps(self, x: Array, y: Array) -> None:
        if x.size and not is_integer(x.dtype):
            self._ulp = max(self._ulp or 0, ulp_distance(x, y))


def diff_scalars(first: LeafEntry, second: LeafEntry) -> LeafDiff:
    """How two scalars differ, of which at least one has another text or type."""
    values = scalar_value(first), scalar_value(second)
    types = {type(value) for value in values}
    measured = LeafDiff(first.path, "", "")
    if types == {float} or types == {complex}:
        dtype = "float64" if types == {float} else "complex128"
        comparison = Comparison(LeafEntry(first.path, dtype))
        comparison.add(0, np.array([values[0]]), np.array([values[1]]))
        measured = comparison.result()
    elif types == {int}:
        distance = abs(values[0] - values[1])
        largest = max(abs(values[0]), abs(values[1]))
        measured = replace(measured, max_abs=distance, max_rel=distance / largest, not_finite=0)
    return replace(
        measured,
        first=describe(first),
        second=describe(second),
        compared=1,
        differing=1,
        first_index=(),
        first_values=(first.text or "", second.text or ""),
    )


def _value_texts(first: Any, second: Any) -> tuple[str, str]:
    """Texts of two elements whose bits differ; with their bits if the texts are the same."""
    one, other = str(first), str(second)
    if one != other:
        return one, other
    words = [int.from_bytes(value.tobytes(), "little") for value in (first, second)]
    return f"{one} (0x{words[0]:x})", f"{other} (0x{words[1]:x})"


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
