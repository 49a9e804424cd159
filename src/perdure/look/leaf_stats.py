"""`stats`: minimum, maximum, mean and so on of the leaves of a checkpoint, or of its branches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from perdure.checkpoint.address import Where, open_checkpoint
from perdure.errors import UnsupportedLeafError
from perdure.look.elements import as_float64, is_integer, parts_dtype
from perdure.look.fixed_order import ScaledSum, block_sum, blocks, exponent_of, times_power
from perdure.look.leaf_reader import (
    KEY_PREFIX,
    element_dtype,
    is_scalar,
    read_elements,
    scalar_value,
    select_leaves,
)
from perdure.look.leaf_tree import check_depth
from perdure.look.tables import Shown, Table, plain, printable
from perdure.store.manifest import LeafEntry

_COLUMNS = ("count", "min", "max", "mean", "std", "norm", "zeros", "nans", "infinities")
_COUNTS = ("leaf_count", "count", "zeros", "nans", "infinities")
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Stats:
    """The numbers in one leaf, or in a branch. A complex number counts as two: its parts.

    Attributes:
        path: The leaf or branch.
        leaf_count: Number of leaves with numbers in it.
        count: Numbers.
        zeros: Those that are 0.0 or -0.0.
        nans: Those that are NaN.
        infinities: Those that are infinite.
        min: Of the finite numbers; None if there are none. So are the next three.
        max: Likewise.
        mean: In float64.
        std: Standard deviation: the root of the mean squared distance from the mean.
        norm: The root of the sum of the squares of the finite numbers.
        problem: Why there are no figures: the leaf has no numbers, or its dtype is not known.
    """

    path: str
    leaf_count: int = 1
    count: int = 0
    zeros: int = 0
    nans: int = 0
    infinities: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    problem: str | None = None


@dataclass(frozen=True, repr=False)
class StatsTable(Shown):
    """The figures of a checkpoint: a row for each leaf or branch.

    Attributes:
        name: The checkpoint.
        rows: The figures, sorted by path.
        unknown: Errors for leaves whose dtype cannot be read here.
    """

    name: str
    rows: tuple[Stats, ...]
    unknown: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON, where None stands for infinities too."""
        rows = [asdict(row) for row in self.rows]
        return plain({"checkpoint": self.name, "rows": rows, "unknown": self.unknown})

    def _blocks(self) -> list[str | Table]:
        header = ("leaf", "count", "min", "max", "mean", "std", "norm", "zeros", "NaN", "inf")
        rows = [
            (
                printable(row.path) or "(state)",
                *(
                    (row.problem, *[None] * 8)
                    if row.problem
                    else tuple(getattr(row, name) for name in _COLUMNS)
                ),
            )
            for row in self.rows
        ]
        return [self.name, Table(header, rows), *self.unknown]


class Accumulator:
    """Figures of numbers that come in blocks. Every addition has its fixed place in the order."""

    def __init__(self) -> None:
        self.leaf_count = self.count = self.zeros = self.nans = self.infinities = 0
        self.finite = 0
        self.min: float | int | None = None
        self.max: float | int | None = None
        self._mean = 0.0
        self._spread = ScaledSum()  # the sum of squared distances from the mean
        self._squares = ScaledSum()

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Add real or complex numbers of any dtype, one-dimensional."""
        values = values.view(parts_dtype(values.dtype))
        for (block,) in blocks(values):
            self._add_block(block)

    def merge(self, other: Accumulator) -> None:
        """Add what another one has counted."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.finite:
            assert other.min is not None
            assert other.max is not None
            self._limits(other.min, other.max)
            self._combine(other.finite, other._mean, other._spread)
            self._squares.merge(other._squares.value, other._squares.exponent)

    def stats(self, path: str) -> Stats:
        """The figures."""
        mean = std = norm = None
        if self.finite:
            variance = ScaledSum()
            variance.merge(self._spread.value / self.finite, self._spread.exponent)
            mean, std, norm = self._mean, variance.root(), self._squares.root()
        counts = {name: getattr(self, name) for name in (*_COUNTS, "min", "max")}
        return Stats(path, mean=mean, std=std, norm=norm, **counts)

    def _add_block(self, block: np.ndarray[Any, Any]) -> None:
        numbers = as_float64(block)
        finite = np.isfinite(numbers)
        count = int(np.count_nonzero(finite))
        self.count += block.size
        self.zeros += block.size - int(np.count_nonzero(numbers))
        if count < block.size:
            nans = int(np.count_nonzero(np.isnan(numbers)))
            self.nans += nans
            self.infinities += block.size - count - nans
            numbers = numbers[finite]
        if not count:
            return
        if block.dtype.kind in "biu":  # float64 would round large ones
            self._limits(int(block.min()), int(block.max()))
        else:
            least, most = float(numbers.min()) + 0.0, float(numbers.max()) + 0.0  # never -0.0
            whole = is_integer(block.dtype)
            self._limits(int(least) if whole else least, int(most) if whole else most)
        scale = exponent_of(numbers)
        mean = times_power(
            block_sum(np.ldexp(numbers, -scale) if scale else numbers) / count, scale
        )
        spread = ScaledSum()
        # Halves: the distance of two finite numbers may be above the largest float64.
        away = numbers / 2 - mean / 2 if scale > 0 else numbers - mean
        spread.add(away, away)
        spread.exponent += 2 if scale > 0 else 0
        self._squares.add(numbers, numbers)
        self._combine(count, mean, spread)

    def _limits(self, least: float | int, most: float | int) -> None:
        self.min = least if self.min is None or least < self.min else self.min
        self.max = most if self.max is None or most > self.max else self.max

    def _combine(self, count: int, mean: float, spread: ScaledSum) -> None:
        """Add a group by its mean and spread (Chan, Golub and LeVeque, 1979)."""
        total = self.finite + count
        if self.finite:
            half = mean / 2 - self._mean / 2
            between = ScaledSum()
            between.add(np.array([half]), np.array([half]))
            weight = 4.0 * self.finite * (count / total)
            self._spread.merge(between.value * weight, between.exponent)
            self._mean += 2 * (half * (count / total))
        else:
            self._mean = mean
        self._spread.merge(spread.value, spread.exponent)
        self.finite = total


def stats(
    where: Where, *, leaves: str | Iterable[str] | None = None, depth: int | None = None
) -> StatsTable:
    """Figures of the leaves of a checkpoint, each with the same bits on every machine.

    Args:
        where: The checkpoint, as for `open_checkpoint`.
        leaves: Only the leaves that these patterns select.
        depth: One row for each branch of so many parts, 0 for one row of the whole state; by default
            one for each leaf. A leaf whose path has fewer parts has a row of its own.

    Raises:
        ArgumentError: A pattern selects nothing, or `depth` is negative.
        CorruptionError: A chunk is damaged, or its pack is missing.
        StoreError: As `open_checkpoint`.
    """
    check_depth(depth)
    checkpoint = open_checkpoint(where)
    rows: dict[str, Accumulator] = {}
    without: dict[str, str] = {}
    unknown: list[str] = []
    arrays: list[LeafEntry] = []
    singles: dict[str, Accumulator] = {}
    for entry in select_leaves(checkpoint, leaves):
        rows.setdefault(_row_of(entry.path, depth), Accumulator())
        try:
            problem = _add_scalar(entry, singles, arrays)
        except UnsupportedLeafError as error:
            unknown.append(str(error))
            problem = f"unknown dtype {entry.dtype}"
        if problem:
            without[entry.path] = problem
    for part in read_elements(checkpoint, arrays):
        singles[part.entry.path].add(part.values)
    for path in sorted(singles):  # in the order of the manifest
        rows[_row_of(path, depth)].merge(singles[path])
    return StatsTable(
        checkpoint.name,
        tuple(
            Stats(path, problem=without.get(path, "no numbers"))
            if not row.leaf_count
            else row.stats(path)
            for path, row in rows.items()
        ),
        tuple(unknown),
    )


def _add_scalar(
    entry: LeafEntry, singles: dict[str, Accumulator], arrays: list[LeafEntry]
) -> str | None:
    """Prepare the figures of one leaf; returns why it has none."""
    if entry.dtype.startswith(KEY_PREFIX):
        return "random keys"
    single = Accumulator()
    if is_scalar(entry):
        value = scalar_value(entry)
        if not isinstance(value, _NUMBERS):
            return f"{entry.dtype.removeprefix('py:')}, no number"
        try:
            single.add(np.array([complex(value) if isinstance(value, complex) else float(value)]))
        except OverflowError:
            return "an integer above the largest float64"
        if isinstance(value, int):
            single.min = single.max = int(value)
    else:
        element_dtype(entry)  # raises for an unknown one
        arrays.append(entry)
    single.leaf_count = 1
    singles[entry.path] = single
    return None


def _row_of(path: str, depth: int | None) -> str:
    return path if depth is None else "/".join(path.split("/")[:depth])
