"""`tree`: what one checkpoint holds, from its manifest alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint, Where, open_checkpoint
from perdure.errors import ArgumentError, StepNotFoundError, StoreError, UnsupportedLeafError
from perdure.look.leaf_reader import (
    KEY_PREFIX,
    element_dtype,
    is_scalar,
    read_elements,
    scalar_value,
    select_leaves,
    value_text,
)
from perdure.look.numerics import as_float64, block_sum, blocks, is_integer, parts_dtype
from perdure.look.tables import Shown, Table, plain, printable, share_text, size_text
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.reader import chunk_size
from perdure.text import counted

VALUE_CHARACTERS = 40
"""The text of a scalar is cut after so many characters in a tree."""


@dataclass(frozen=True)
class LeafTreeNode:
    """A leaf, or a branch ("" is the state) with everything below it.

    `shared_nbytes`: those that the step before has too; None without one.
    """

    path: str
    depth: int
    leaf_count: int
    nbytes: int
    shared_nbytes: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: str | None = None

    def describe(self) -> str:
        """`float32[3,4]`, `int 7`, or the number of leaves of a branch."""
        if self.dtype is None:
            return counted(self.leaf_count, "leaf", "leaves")
        return value_text(self.dtype, self.shape, self.value, VALUE_CHARACTERS)


@dataclass(frozen=True, repr=False)
class LeafTree(Shown):
    """The leaves of a checkpoint as a tree, each branch before what is below it.

    `before` is the step before it; `unread_before` says why that cannot be read.
    """

    name: str
    before: int | None
    nodes: tuple[LeafTreeNode, ...]
    unread_before: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The tree for JSON."""
        return {
            "checkpoint": self.name,
            "before": self.before,
            "unread_before": self.unread_before,
            "nodes": [asdict(node) for node in self.nodes],
        }

    def _blocks(self) -> list[str | Table]:
        whole = self.nodes[0].nbytes if self.nodes else 0
        header = ["leaf", "value", "size", "share"]
        if self.before is not None:
            header.append(f"as in step {self.before}")
        rows = []
        for node in self.nodes:
            name = printable(node.path.rpartition("/")[2]) if node.path else "(state)"
            row = ["  " * node.depth + name, node.describe(), size_text(node.nbytes)]
            row.append(share_text(node.nbytes, whole))
            if node.shared_nbytes is not None:
                row.append(share_text(node.shared_nbytes, node.nbytes))
            rows.append(row)
        blocks: list[str | Table] = [self.name, Table(header, rows, ["share", *header[4:], "size"])]
        if self.unread_before:
            blocks.append(f"what the step before has too is not known: {self.unread_before}")
        return blocks


def tree(
    where: Where, *, leaves: str | Iterable[str] | None = None, depth: int | None = None
) -> LeafTree:
    """The leaves of a checkpoint as a tree; reads manifests and no chunk.

    Args:
        where: The checkpoint, as for `open_checkpoint`.
        leaves: Only the leaves that these patterns select; shares are those of the selection.
        depth: Show branches of so many parts and nothing below them.

    Raises:
        ArgumentError: A pattern selects nothing, or `depth` is negative.
        StoreError: As `open_checkpoint`.
    """
    check_depth(depth)
    checkpoint = open_checkpoint(where)
    entries = select_leaves(checkpoint, leaves)
    before, unread = _manifest_before(checkpoint)
    held = None if before is None else _contents_of(before)
    return LeafTree(
        checkpoint.name,
        None if before is None else before.step,
        tuple(_nodes(entries, held, depth)),
        unread,
    )


def check_depth(depth: object) -> None:
    """Raise `ArgumentError` unless `depth` is None or an integer of at least 0."""
    if depth is not None and (not isinstance(depth, SupportsIndex) or operator.index(depth) < 0):
        raise ArgumentError(f"depth: expected an integer of at least 0, found {depth!r}.")


def _manifest_before(checkpoint: StoredCheckpoint) -> tuple[Manifest | None, str]:
    """The manifest of the step before a checkpoint in its run, or why it cannot be read."""
    earlier = [step for step in checkpoint.run.steps() if step < checkpoint.step]
    try:
        return (checkpoint.run.manifest(earlier[-1]) if earlier else None), ""
    except StepNotFoundError:  # deleted since it was listed
        return None, ""
    except StoreError as error:
        return None, str(error)


def _contents_of(manifest: Manifest) -> set[object]:
    """The hashes of all chunks of a state, and path and text of each scalar."""
    hashes: set[object] = {chunk.hash for leaf in manifest.leaves for chunk in leaf.chunks}
    return hashes | {(leaf.path, leaf.text) for leaf in manifest.leaves if leaf.text is not None}


def _shared_bytes(entry: LeafEntry, held: set[object]) -> int:
    """Bytes of a leaf in chunks that `held` has; of a scalar, if the leaf has the same text there."""
    if entry.text is not None:
        return entry.nbytes if (entry.path, entry.text) in held else 0
    return sum(chunk_size(entry, n) for n, chunk in enumerate(entry.chunks) if chunk.hash in held)


def _nodes(
    entries: list[LeafEntry], held: set[object] | None, depth: int | None
) -> list[LeafTreeNode]:
    """A node for each leaf and each branch above it of at most `depth` parts, branches first."""
    totals: dict[str, list[int]] = {}
    for entry in entries:
        shared = 0 if held is None else _shared_bytes(entry, held)
        parts = entry.path.split("/") if entry.path else []
        for level in range(len(parts) + 1):
            if depth is None or level <= depth:
                total = totals.setdefault("/".join(parts[:level]), [0, 0, 0])
                for place, number in enumerate((1, entry.nbytes, shared)):
                    total[place] += number
    kinds: dict[str, Any] = {e.path: (e.dtype, e.shape, e.text) for e in entries}
    return [
        LeafTreeNode(
            path,
            path.count("/") + 1 if path else 0,
            count,
            nbytes,
            None if held is None else shared,
            *kinds.get(path, ()),
        )
        for path, (count, nbytes, shared) in totals.items()
    ]


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
    """The figures of a checkpoint by path, and an error for each leaf whose dtype is not known
    here.
    """

    name: str
    rows: tuple[Stats, ...]
    unknown: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON."""
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
                    else (getattr(row, c) for c in _COLUMNS)
                ),
            )
            for row in self.rows
        ]
        return [self.name, Table(header, rows), *self.unknown]


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
        """Add real or complex numbers of any dtype, one-dimensional."""
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
        """The figures."""
        counts = {name: getattr(self, name) for name in (*_COUNTS, "min", "max")}
        if not self.finite:
            return Stats(path, **counts)
        std, norm = math.sqrt(self.spread / self.finite), math.sqrt(self.squares)
        return Stats(path, mean=self.mean, std=std, norm=norm, **counts)


def _block_figures(block: np.ndarray[Any, Any]) -> _Figures:
    """The figures of at most one block of real numbers."""
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
    check_depth(depth)
    checkpoint = open_checkpoint(where)
    entries = select_leaves(checkpoint, leaves)
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
    arrays = [entry for entry in entries if entry.path in figures and not is_scalar(entry)]
    for part in read_elements(checkpoint, arrays):
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
    if entry.dtype.startswith(KEY_PREFIX):
        return "random keys"
    if not is_scalar(entry):
        element_dtype(entry)  # raises for an unknown one
        return figures
    value = scalar_value(entry)
    if not isinstance(value, (bool, int, float, complex)):
        return f"{entry.dtype.removeprefix('py:')}, no number"
    try:
        figures.add(np.array([complex(value) if isinstance(value, complex) else float(value)]))
    except OverflowError:
        return "an integer above the largest float64"
    if isinstance(value, int):
        figures.min = figures.max = int(value)
    return figures
