"""`stats`: minimum, maximum, mean and so on of the leaves of a checkpoint, or of its branches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure.checkpoint.address import Where, open_checkpoint
from perdure.checkpoint.arguments import integer
from perdure.errors import UnsupportedLeafError
from perdure.look import leaf_reader
from perdure.look.numerics import as_float64, block_sum, blocks, is_integer, parts_dtype
from perdure.look.tables import Shown, Table
from perdure.store.manifest import LeafEntry
from perdure.text import printable

_COLUMNS = ("count", "min", "max", "mean", "std", "norm", "zeros", "nans", "infinities")
_COUNTS = ("leaf_count", "count", "zeros", "nans", "infinities")


@dataclass(frozen=True)
class Stats:
    """The numbers in one leaf, or in a branch. A complex number counts as two: its parts.

    `min`, `max`, `mean`, `std` and `norm` (float64) are of the finite numbers; None if there are
    none. `problem`: why there are no figures.
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
    """The figures of a checkpoint by path, and an error for each leaf of an unknown dtype."""

    checkpoint: str
    rows: tuple[Stats, ...]
    unknown: tuple[str, ...] = ()

    def _blocks(self) -> list[str | Table]:
        header = ("leaf", "count", "min", "max", "mean", "std", "norm", "zeros", "NaN", "inf")
        rows = [
            (
                printable(row.path) or "(state)",
                *(
                    (row.problem, *[None] * 8)
                    if row.problem
                    else (getattr(row, c) for c in _COLUMNS)
                ),
            )
            for row in self.rows
        ]
        return [self.checkpoint, Table(header, rows), *self.unknown]


class _Figures:
    """Figures of numbers that come in blocks. Every addition has its fixed place in the order."""

    def __init__(self) -> None:
        self.leaf_count = self.count = self.zeros = self.nans = self.infinities = 0
        self.finite = 0
        self.min: float | int | None = None
        self.max: float | int | None = None
        self.mean = 0.0
        self.spread = 0.0  # the sum of squared distances from the mean
        self.squares = 0.0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for (block,) in blocks(values.view(parts_dtype(values.dtype))):
                self.merge(_block_figures(block))

    def merge(self, other: _Figures) -> None:
        """Add what another one has counted (Chan, Golub and LeVeque, 1979)."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if not other.finite:
            return
        assert other.min is not None
        assert other.max is not None
        self.min = other.min if self.min is None else min(self.min, other.min)
        self.max = other.max if self.max is None else max(self.max, other.max)
        total = self.finite + other.finite
        if self.finite:
            half = other.mean / 2 - self.mean / 2
            self.spread += half * half * (4.0 * self.finite * (other.finite / total))
            self.mean += 2 * (half * (other.finite / total))
        else:
            self.mean = other.mean
        self.spread += other.spread
        self.squares += other.squares
        self.finite = total

    def stats(self, path: str) -> Stats:
        counts = {name: getattr(self, name) for name in (*_COUNTS, "min", "max")}
        if not self.finite:
            return Stats(path, **counts)
        std, norm = math.sqrt(self.spread / self.finite), math.sqrt(self.squares)
        return Stats(path, mean=self.mean, std=std, norm=norm, **counts)


def _block_figures(block: np.ndarray[Any, Any]) -> _Figures:
    figures = _Figures()
    numbers = as_float64(block)
    finite = np.isfinite(numbers)
    figures.finite = int(np.count_nonzero(finite))
    figures.count = block.size
    figures.zeros = block.size - int(np.count_nonzero(numbers))
    if figures.finite < block.size:
        figures.nans = int(np.count_nonzero(np.isnan(numbers)))
        figures.infinities = block.size - figures.finite - figures.nans
        numbers = numbers[finite]
    if not figures.finite:
        return figures
    if block.dtype.kind in "biu":  # float64 would round large ones
        figures.min, figures.max = int(block.min()), int(block.max())
    else:
        least, most = float(numbers.min()) + 0.0, float(numbers.max()) + 0.0  # never -0.0
        whole = is_integer(block.dtype)
        figures.min, figures.max = (int(least), int(most)) if whole else (least, most)
    figures.mean = block_sum(numbers) / figures.finite
    away = numbers - figures.mean
    figures.spread = block_sum(away * away)
    figures.squares = block_sum(numbers * numbers)
    return figures


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
    integer("depth", depth, 0, optional=True)
    checkpoint = open_checkpoint(where)
    entries = leaf_reader.select_leaves(checkpoint, leaves)
    figures: dict[str, _Figures] = {}
    problems: dict[str, str] = {}
    unknown: list[str] = []
    for entry in entries:
        try:
            found = _begun(entry)
        except UnsupportedLeafError as error:
            unknown.append(str(error))
            found = f"unknown dtype {entry.dtype}"
        if isinstance(found, str):
            problems[entry.path] = found
        else:
            figures[entry.path] = found
    arrays = [
        entry for entry in entries if entry.path in figures and not leaf_reader.is_scalar(entry)
    ]
    for part in leaf_reader.read_elements(checkpoint, arrays):
        figures[part.entry.path].add(part.values)
    rows: dict[str, _Figures] = {}
    for entry in entries:
        name = entry.path if depth is None else "/".join(entry.path.split("/")[:depth])
        row = rows.setdefault(name, _Figures())
        if entry.path in figures:
            row.merge(figures[entry.path])
    return StatsTable(
        checkpoint.name,
        tuple(
            row.stats(path)
            if row.leaf_count
            else Stats(path, problem=problems.get(path, "no numbers"))
            for path, row in rows.items()
        ),
        tuple(unknown),
    )


def _begun(entry: LeafEntry) -> _Figures | str:
    """The figures of a scalar, those of an array that is to be read, or why the leaf has none."""
    figures = _Figures()
    figures.leaf_count = 1
    if entry.dtype.startswith(leaf_reader.KEY_PREFIX):
        return "random keys"
    if not leaf_reader.is_scalar(entry):
        leaf_reader.element_dtype(entry)  # raises for an unknown one
        return figures
    value = leaf_reader.scalar_value(entry)
    if not isinstance(value, (bool, int, float, complex)):
        return f"{entry.dtype.removeprefix('py:')}, no number"
    try:
        figures.add(np.array([complex(value) if isinstance(value, complex) else float(value)]))
    except OverflowError:
        return "an integer above the largest float64"
    if isinstance(value, int):
        figures.min = figures.max = int(value)
    return figures
