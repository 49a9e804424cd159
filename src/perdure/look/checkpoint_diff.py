"""`diff`: what differs between two checkpoints. Equal chunks are known by their hashes and not read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perdure.checkpoint.address import (
    StoredCheckpoint,
    Where,
    checkpoint_at,
    find_run,
    open_checkpoint,
)
from perdure.errors import StepNotFoundError, UnsupportedLeafError
from perdure.look import leaf_reader, numerics
from perdure.look.numerics import blocks, cosine
from perdure.look.tables import Shown, Table, size_text
from perdure.store.format import steps_text
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.selection import Selection
from perdure.text import counted, few, printable

_MOST_PATHS = 20
_VALUE = 60


@dataclass(frozen=True)
class LeafDiff:
    """How a leaf differs. Figures that have no meaning for it are None.

    `compared` are the elements in chunks that differ, `differing` those with other bits (-0.0 is
    not 0.0). `not_finite` pairs do not count in the figures after it, where a complex number counts as
    two; `max_rel` is by the larger absolute value, `rel_norm` by the norm of the first side. `problem`:
    why elements were not compared.
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


@dataclass(frozen=True)
class FieldDiff:
    """A field of a recipe, or a metric, with the value on both sides; None if one lacks it."""

    name: str
    first: str | int | float | bool | None
    second: str | int | float | bool | None


@dataclass(frozen=True, repr=False)
class CheckpointDiff(Shown):
    """What differs between two checkpoints.

    No chunk of `equal_leaves` was read. `changed` are on both sides with other bits, dtype or shape.
    `environment` are fields of the recipe about software and hardware. `process_leaves` that differ are
    no part of the state. `common`: the common steps of two runs, and how many are equal before.
    """

    first: str
    second: str
    equal_leaves: int = 0
    equal_nbytes: int = 0
    changed: tuple[LeafDiff, ...] = ()
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    recipe: tuple[FieldDiff, ...] = ()
    environment: tuple[FieldDiff, ...] = ()
    metrics: tuple[FieldDiff, ...] = ()
    process_leaves: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    read_nbytes: int = 0
    common: str = ""

    @property
    def equal(self) -> bool:
        """Whether the selected leaves are equal: same paths, dtypes, shapes and bits."""
        return not (self.changed or self.only_first or self.only_second)

    def as_dict(self) -> dict[str, Any]:
        return {"equal": self.equal, **super().as_dict()}

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
        for side, paths in (("A", self.only_first), ("B", self.only_second)):
            blocks += [f"only in {side}: {path}" for path in paths[:_MOST_PATHS]]
            if (more := len(paths) - _MOST_PATHS) > 0:
                blocks.append(f"only in {side}: and {more:,} more")
        named = {"recipe": self.recipe, "environment": self.environment, "metric": self.metrics}
        for title, fields in named.items():
            if fields:
                rows = [(each.name, _value(each.first), _value(each.second)) for each in fields]
                blocks.append(Table((title, "A", "B"), rows))
        if generators := len(self.process_leaves) - self.process_leaves.count(leaf_reader.ORIGIN):
            count = counted(generators, "leaf", "leaves")
            blocks.append(
                f"differing beside the state, such as random generators of processes: {count}"
            )
        if leaf_reader.ORIGIN in self.process_leaves:
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
            *(_element(leaf, n) for n in (0, 1)),
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


def _element(leaf: LeafDiff, side: int) -> str:
    """The first element that differs; of scalars of two types with the type: `str 1`, `int 1`."""
    text = leaf.first_values[side] if leaf.first_values else ""
    kind = (leaf.first, leaf.second)[side]
    return _value(text if leaf.first == leaf.second else f"{kind} {text}")


def _value(value: object) -> str:
    return "" if value is None else printable(str(value), _VALUE)


def diff(
    first: Where, second: Where, *, leaves: str | Iterable[str] | None = None
) -> CheckpointDiff:
    """Compare two checkpoints, or two runs at the first common step that differs.

    Only chunks that differ are read. Every figure has the same bits on every machine.

    Args:
        first: As for `open_checkpoint`; two runs without `@` are compared at the first common step
            whose states differ, or at the last common one.
        second: As `first`.
        leaves: Only the leaves that these patterns select on either side.

    Raises:
        StepNotFoundError: The runs have no step in common, or there is no such checkpoint.
        ArgumentError: A pattern selects nothing on either side.
        CorruptionError: A chunk is damaged, or its pack is missing.
        StoreError: As `open_checkpoint`.
    """
    selection = None if leaves is None else Selection(leaves)
    a, b, common = _opened(first, second, selection)
    ours, theirs = _leaves(a.manifest, selection), _leaves(b.manifest, selection)
    if selection is not None:
        paths = {leaf.path for side in (a, b) for leaf in side.manifest.leaves}
        leaf_reader.refuse_unused(selection, sorted(paths), f"{a.name} and {b.name}")
    both = [(leaf, theirs[path]) for path, leaf in ours.items() if path in theirs]
    differing = [(ours, theirs) for ours, theirs in both if ours.bits != theirs.bits]
    changed, read = _compare((a, b), differing)
    recipe, environment = _recipes(a.manifest, b.manifest)
    process_leaves = [_bits(each.manifest.process_leaves) for each in (a, b)]
    return CheckpointDiff(
        a.name,
        b.name,
        equal_leaves=len(both) - len(differing),
        equal_nbytes=sum(leaf.nbytes for leaf, other in both if leaf.bits == other.bits),
        changed=changed,
        only_first=tuple(path for path in ours if path not in theirs),
        only_second=tuple(path for path in theirs if path not in ours),
        recipe=recipe,
        environment=environment,
        metrics=_fields(a.manifest.metrics, b.manifest.metrics),
        process_leaves=_unequal(*process_leaves),
        containers=_unequal(a.manifest.containers, b.manifest.containers),
        read_nbytes=read,
        common=common,
    )


def _opened(
    first: Where, second: Where, selection: Selection | None
) -> tuple[StoredCheckpoint, StoredCheckpoint, str]:
    """The two checkpoints to compare, and a sentence on the common steps of two runs."""
    addresses = find_run(first), find_run(second)
    if any(address.which is not None for address in addresses):
        return open_checkpoint(first), open_checkpoint(second), ""
    steps = [address.run.steps() for address in addresses]
    common = sorted(set(steps[0]).intersection(steps[1]))
    if not common:
        has = " and ".join(
            f"{address.run.where} has {steps_text(held) if held else 'no checkpoint'}"
            for address, held in zip(addresses, steps, strict=True)
        )
        raise StepNotFoundError(
            f"expected two runs with a step in common, found none: {has}. Compare two checkpoints by "
            f"their steps, RUN@STEP."
        )
    found = f"{counted(len(common), 'common step')} ({steps_text(common)})"
    before = 0
    while True:
        a, b = (checkpoint_at(address.run, common[before], address.given) for address in addresses)
        if _unequal(*(_bits(_leaves(each.manifest, selection).values()) for each in (a, b))):
            return a, b, f"{found}, equal before this one: {before}"
        before += 1
        if before == len(common):
            return a, b, f"{found}, all equal; the last one is shown"


def _leaves(manifest: Manifest, selection: Selection | None) -> dict[str, LeafEntry]:
    return {
        leaf.path: leaf
        for leaf in manifest.leaves
        if selection is None or selection.matches(leaf.path)
    }


def _bits(leaves: Iterable[LeafEntry]) -> dict[str, object]:
    return {leaf.path: leaf.bits for leaf in leaves}


def _compare(
    sides: tuple[StoredCheckpoint, StoredCheckpoint], pairs: Sequence[tuple[LeafEntry, LeafEntry]]
) -> tuple[tuple[LeafDiff, ...], int]:
    found = {ours.path: _without_reading(ours, theirs) for ours, theirs in pairs}
    to_read = [pair for pair in pairs if found[pair[0].path] is None]
    comparisons = {ours.path: _Comparison(ours) for ours, _ in to_read}
    chunks: dict[str, list[int]] = {}
    for ours, theirs in to_read:
        hashes = zip(ours.chunks, theirs.chunks, strict=True)
        chunks[ours.path] = [n for n, (a, b) in enumerate(hashes) if a.hash != b.hash]
    streams = [
        leaf_reader.read_elements(sides[n], [pair[n] for pair in to_read], chunks) for n in (0, 1)
    ]
    read = 0
    for first, second in zip(*streams, strict=True):
        read += first.values.nbytes + second.values.nbytes
        comparisons[first.entry.path].add(first.start, first.values, second.values)
    return tuple(leaf or comparisons[path].result() for path, leaf in found.items()), read


def _without_reading(ours: LeafEntry, theirs: LeafEntry) -> LeafDiff | None:
    """The difference of a pair whose elements cannot be compared one by one."""
    try:
        if leaf_reader.is_scalar(ours) and leaf_reader.is_scalar(theirs):
            return _diff_scalars(ours, theirs)
        if (ours.dtype, ours.shape, ours.nbytes) != (theirs.dtype, theirs.shape, theirs.nbytes):
            kinds = "dtype" if ours.dtype != theirs.dtype else "shape"
            same = ", the same bytes" if ours.hashes() == theirs.hashes() else ""
            return _problem(ours, theirs, f"another {kinds}{same}")
        leaf_reader.element_dtype(ours)
    except UnsupportedLeafError as error:
        return _problem(ours, theirs, str(error))
    return None


def _problem(ours: LeafEntry, theirs: LeafEntry, problem: str) -> LeafDiff:
    count = math.prod(leaf_reader.element_shape(ours))
    return LeafDiff(
        ours.path, leaf_reader.describe(ours), leaf_reader.describe(theirs), count, problem=problem
    )


def _recipes(
    first: Manifest, second: Manifest
) -> tuple[tuple[FieldDiff, ...], tuple[FieldDiff, ...]]:
    """The fields of the recipe that differ, and those of the environment."""
    if not (fields := _fields(first.recipe, second.recipe)):
        return (), ()
    from perdure.checkpoint.recipe import ENVIRONMENT_FIELDS  # takes long to import

    inside = tuple(field for field in fields if field.name in ENVIRONMENT_FIELDS)
    return tuple(field for field in fields if field not in inside), inside


def _fields(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[FieldDiff, ...]:
    typed = [
        {name: (type(value), value) for name, value in side.items()} for side in (first, second)
    ]
    return tuple(FieldDiff(name, first.get(name), second.get(name)) for name in _unequal(*typed))


def _unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        path
        for path in sorted({*ours, *theirs})
        if path not in ours or path not in theirs or ours[path] != theirs[path]
    )


class _Comparison:
    """Compares the elements of two leaves of one dtype and shape, a chunk at a time."""

    def __init__(self, entry: LeafEntry) -> None:
        self._entry = entry
        self._shape = leaf_reader.element_shape(entry)
        self._keys = entry.dtype.startswith(leaf_reader.KEY_PREFIX)
        self._compared = self._differing = self._not_finite = 0
        self._first: tuple[int, str, str] | None = None
        self._ulp: int | None = None
        self._abs: float | int | None = None
        self._rel: float | None = None
        # Sums over pairs: of squared differences, of squares of each side, of products.
        self._distance = self._squares = self._other_squares = self._products = 0.0

    def add(self, start: int, first: numerics.Array, second: numerics.Array) -> None:
        with np.errstate(over="ignore", under="ignore"):
            for x, y in blocks(first, second):
                self._add_block(start, x, y)
                start += x.size

    def result(self) -> LeafDiff:
        index = texts = None
        if self._first is not None:
            number, *values = self._first
            index = tuple(map(int, np.unravel_index(number, self._shape))) if self._shape else ()
            texts = values[0], values[1]
        measured = self._abs is not None
        return LeafDiff(
            self._entry.path,
            leaf_reader.describe(self._entry),
            leaf_reader.describe(self._entry),
            math.prod(self._shape),
            self._compared,
            self._differing,
            index,
            texts,
            None if self._keys else self._not_finite,
            self._ulp,
            self._abs,
            self._rel,
            numerics.root_ratio(self._distance, self._squares) if measured else None,
            cosine(self._products, self._squares, self._other_squares) if measured else None,
        )

    def _add_block(self, start: int, x: numerics.Array, y: numerics.Array) -> None:
        dtype = numerics.parts_dtype(x.dtype)
        x_parts, y_parts = x.view(dtype), y.view(dtype)
        differs = numerics.bits(x_parts) != numerics.bits(y_parts)
        elements = differs if dtype == x.dtype else differs.reshape(-1, 2).any(axis=1)
        self._compared += x.size
        if count := int(np.count_nonzero(elements)):
            self._differing += count
            if self._first is None:
                index = int(np.argmax(elements))
                self._first = (start + index, *_value_texts(x[index], y[index]))
        if not self._keys:
            self._measure(x_parts, y_parts, differs)

    def _measure(self, x: numerics.Array, y: numerics.Array, differs: numerics.Array) -> None:
        same = not differs.any()
        a = numerics.as_float64(x)
        b = a if same else numerics.as_float64(y)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            self._not_finite += int(np.count_nonzero(differs & ~finite))
            numbers = ~(np.isnan(a) | np.isnan(b))
            self._steps(x[differs & numbers], y[differs & numbers])
            x, y, a, b, differs = x[finite], y[finite], a[finite], b[finite], differs[finite]
        if not a.size:
            return
        self._abs = self._abs or 0
        squares = numerics.product_sum(a, a)
        self._squares += squares
        self._other_squares += squares if same else numerics.product_sum(b, b)
        self._products += squares if same else numerics.product_sum(a, b)
        if not differs.any():
            return
        x, y, a, b = x[differs], y[differs], a[differs], b[differs]
        self._steps(x, y)
        distance = b - a
        larger = np.maximum(np.abs(a), np.abs(b))
        relative = np.abs(distance) / np.where(larger > 0, larger, 1.0)
        self._rel = max(self._rel or 0.0, float(relative.max()))
        self._distance += numerics.product_sum(distance, distance)
        exact = numerics.is_integer(x.dtype)
        largest = numerics.integer_distance(x, y) if exact else float(np.abs(distance).max())
        self._abs = max(self._abs, largest)

    def _steps(self, x: numerics.Array, y: numerics.Array) -> None:
        if x.size and not numerics.is_integer(x.dtype):
            self._ulp = max(self._ulp or 0, numerics.ulp_distance(x, y))


def _diff_scalars(first: LeafEntry, second: LeafEntry) -> LeafDiff:
    values = leaf_reader.scalar_value(first), leaf_reader.scalar_value(second)
    types = {type(value) for value in values}
    measured = LeafDiff(first.path, "", "")
    if types == {float} or types == {complex}:
        dtype = "float64" if types == {float} else "complex128"
        comparison = _Comparison(LeafEntry(first.path, dtype))
        comparison.add(0, np.array([values[0]]), np.array([values[1]]))
        measured = comparison.result()
    elif types == {int}:
        distance = abs(values[0] - values[1])
        largest = max(abs(values[0]), abs(values[1]))
        measured = replace(measured, max_abs=distance, max_rel=distance / largest, not_finite=0)
    return replace(
        measured,
        first=leaf_reader.describe(first),
        second=leaf_reader.describe(second),
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
