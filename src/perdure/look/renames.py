"""Leaves that exist on one side only, and are probably one leaf under two names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product
from typing import Any

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import UnsupportedLeafError
from perdure.look.elements import as_float64, is_integer
from perdure.look.fixed_order import ScaledSum, ratio
from perdure.look.leaf_reader import KEY_PREFIX, element_dtype, is_scalar, read_elements
from perdure.store.manifest import LeafEntry
from perdure.store.reader import chunk_size

NEAR = 0.9
"""Leaves whose samples have at least this cosine are near in content."""

SAMPLE = 16_384
"""Elements at the start of a leaf by which content is compared."""

MOST_SAMPLES = 256
"""Of more leaves of one dtype and shape, only equal bytes are looked for."""


@dataclass(frozen=True)
class Rename:
    """A leaf that probably has another path on the second side.

    Attributes:
        first: Its path on the one side.
        second: Its path on the other.
        cosine: None if the bytes are the same; otherwise the likeness of the first elements.
    """

    first: str
    second: str
    cosine: float | None = None


def likely_renames(
    first: StoredCheckpoint,
    first_only: Sequence[LeafEntry],
    second: StoredCheckpoint,
    second_only: Sequence[LeafEntry],
) -> tuple[list[Rename], int]:
    """Pair leaves of the same dtype and shape: those with the same bytes, then those near in content.

    Of several candidates with the same likeness, the one with the most similar path is taken. Reads one
    chunk of each leaf that could be near another one, but none of a manifest file.

    Args:
        first, second: The checkpoints.
        first_only, second_only: Leaves that only one of them has.

    Returns:
        The pairs, and the bytes that were read.
    """
    same = _paired(first_only, second_only)
    if first.is_loose or second.is_loose:
        return same, 0
    taken = {path for rename in same for path in (rename.first, rename.second)}
    ours, theirs = (
        _grouped((leaf for leaf in only if leaf.path not in taken and _has_floats(leaf)), _type)
        for only in (first_only, second_only)
    )
    near: list[Rename] = []
    nbytes = 0
    for kind in sorted(ours.keys() & theirs.keys()):
        if max(len(ours[kind]), len(theirs[kind])) <= MOST_SAMPLES:
            near += _near(_samples(first, ours[kind]), _samples(second, theirs[kind]))
            nbytes += sum(chunk_size(leaf, 0) for leaf in (*ours[kind], *theirs[kind]))
    return sorted([*same, *near], key=lambda rename: rename.first), nbytes


def _paired(first: Sequence[LeafEntry], second: Sequence[LeafEntry]) -> list[Rename]:
    """The leaves with the same bytes; of scalars, whose bytes say little, also with the same name."""

    def content(leaf: LeafEntry) -> Any:
        name = leaf.path.rpartition("/")[2] if is_scalar(leaf) else ""
        return (*_type(leaf), name, *leaf.hashes())

    ours, theirs = _grouped(first, content), _grouped(second, content)
    candidates: list[tuple[float, str, str]] = []
    for kind in ours.keys() & theirs.keys():
        sides = [[leaf.path for leaf in side[kind]] for side in (ours, theirs)]
        few = max(map(len, sides)) <= MOST_SAMPLES
        # Of very many leaves with the same bytes, those at the same place in both orders are paired.
        pairs = product(*sides) if few else zip(*sides, strict=False)
        candidates += [(1.0, a, b) for a, b in pairs]
    return [Rename(a, b) for _, a, b in _best(candidates)]


def _near(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Rename]:
    candidates: list[tuple[float, str, str]] = []
    for (path, sample), (other, candidate) in product(ours.items(), theirs.items()):
        sums = []
        for left, right in ((sample, candidate), (sample, sample), (candidate, candidate)):
            sums.append(ScaledSum())
            sums[-1].add(left, right)
        cosine = ratio(*sums)
        if cosine is not None and cosine >= NEAR:
            candidates.append((cosine, path, other))
    return [Rename(a, b, cosine) for cosine, a, b in _best(candidates)]


def _best(candidates: Iterable[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Pairs without a path in two of them: the most alike first, then those of similar paths."""
    ranked = sorted(
        candidates,
        key=lambda each: (-each[0], -SequenceMatcher(None, each[1], each[2]).ratio(), each[1:]),
    )
    chosen: list[tuple[float, str, str]] = []
    ours: set[str] = set()
    theirs: set[str] = set()
    for likeness, a, b in ranked:
        if a not in ours and b not in theirs:
            ours.add(a)
            theirs.add(b)
            chosen.append((likeness, a, b))
    return chosen


def _samples(checkpoint: StoredCheckpoint, entries: Sequence[LeafEntry]) -> dict[str, Any]:
    """The first elements of each leaf as float64, with 0 in place of NaN and infinities."""
    samples = {}
    for part in read_elements(checkpoint, entries, {entry.path: [0] for entry in entries}):
        values = as_float64(part.values[:SAMPLE])
        samples[part.entry.path] = np.where(np.isfinite(values), values, 0.0)
    return samples


def _grouped(entries: Iterable[LeafEntry], key: Any) -> dict[Any, list[LeafEntry]]:
    groups: dict[Any, list[LeafEntry]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return groups


def _type(leaf: LeafEntry) -> tuple[str, tuple[int, ...]]:
    return leaf.dtype, leaf.shape


def _has_floats(leaf: LeafEntry) -> bool:
    """Whether content can be near: a leaf of real floats with at least one chunk."""
    if is_scalar(leaf) or leaf.dtype.startswith(KEY_PREFIX) or not leaf.chunks:
        return False
    try:
        dtype = element_dtype(leaf)
    except UnsupportedLeafError:
        return False
    return dtype.kind != "c" and not is_integer(dtype)
