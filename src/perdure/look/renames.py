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
from perdure.look.leaf_reader import KEY_PREFIX, element_dtype, is_scalar, read_elements
from perdure.look.numerics import as_float64, cosine, is_inexact, product_sum
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
    chunk of each leaf that could be near another one.

    Args:
        first, second: The checkpoints.
        first_only, second_only: Leaves that only one of them has.

    Returns:
        The pairs, and the bytes that were read.
    """
    same: list[tuple[float, str, str]] = []
    for ours, theirs in _alike(first_only, second_only, _content):
        sides = [leaf.path for leaf in ours], [leaf.path for leaf in theirs]
        few = max(map(len, sides)) <= MOST_SAMPLES
        # Of very many leaves with the same bytes, those at the same place in both orders are paired.
        same += [(1.0, a, b) for a, b in (product(*sides) if few else zip(*sides, strict=False))]
    pairs = [Rename(a, b) for _, a, b in _best(same)]
    taken = {path for pair in pairs for path in (pair.first, pair.second)}
    ours_left, theirs_left = (
        [leaf for leaf in only if leaf.path not in taken and _has_floats(leaf)]
        for only in (first_only, second_only)
    )
    near: list[tuple[float, str, str]] = []
    nbytes = 0
    for ours, theirs in _alike(ours_left, theirs_left, lambda leaf: (leaf.dtype, leaf.shape)):
        if max(len(ours), len(theirs)) <= MOST_SAMPLES:
            near += _near(_samples(first, ours), _samples(second, theirs))
            nbytes += sum(chunk_size(leaf, 0) for leaf in (*ours, *theirs))
    pairs += [Rename(a, b, likeness) for likeness, a, b in _best(near)]
    return sorted(pairs, key=lambda pair: pair.first), nbytes


def _alike(
    first: Iterable[LeafEntry], second: Iterable[LeafEntry], key: Any
) -> Iterable[tuple[list[LeafEntry], list[LeafEntry]]]:
    """The leaves of both sides that have the same key."""
    groups: dict[Any, tuple[list[LeafEntry], list[LeafEntry]]] = defaultdict(lambda: ([], []))
    for side, entries in enumerate((first, second)):
        for entry in entries:
            groups[key(entry)][side].append(entry)
    return [group for group in groups.values() if all(group)]


def _content(leaf: LeafEntry) -> Any:
    """dtype, shape and bytes; of scalars, whose bytes say little, also the name."""
    name = leaf.path.rpartition("/")[2] if is_scalar(leaf) else ""
    return (leaf.dtype, leaf.shape, name, *leaf.hashes())


def _near(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[float, str, str]]:
    """The pairs whose samples are near, with their cosines."""
    squares = [{path: product_sum(a, a) for path, a in side.items()} for side in (ours, theirs)]
    candidates: list[tuple[float, str, str]] = []
    for (path, sample), (other, candidate) in product(ours.items(), theirs.items()):
        found = cosine(product_sum(sample, candidate), squares[0][path], squares[1][other])
        if found is not None and found >= NEAR:
            candidates.append((found, path, other))
    return candidates


def _best(candidates: Iterable[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Pairs without a path in two of them: the most alike first, then those of similar paths."""
    ranked = sorted(
        candidates,
        key=lambda each: (-each[0], -SequenceMatcher(None, each[1], each[2]).ratio(), each[1:]),
    )
    chosen: dict[str, tuple[float, str, str]] = {}
    theirs: set[str] = set()
    for likeness, a, b in ranked:
        if a not in chosen and b not in theirs:
            chosen[a] = likeness, a, b
            theirs.add(b)
    return list(chosen.values())


def _samples(checkpoint: StoredCheckpoint, entries: Sequence[LeafEntry]) -> dict[str, Any]:
    """The first elements of each leaf as float64, with 0 in place of NaN and infinities."""
    samples = {}
    for part in read_elements(checkpoint, entries, {entry.path: [0] for entry in entries}):
        values = as_float64(part.values[:SAMPLE])
        samples[part.entry.path] = np.where(np.isfinite(values), values, 0.0)
    return samples


def _has_floats(leaf: LeafEntry) -> bool:
    """Whether content can be near: a leaf of real floats with at least one chunk."""
    if is_scalar(leaf) or leaf.dtype.startswith(KEY_PREFIX) or not leaf.chunks:
        return False
    try:
        dtype = element_dtype(leaf)
    except UnsupportedLeafError:
        return False
    return dtype.kind != "c" and is_inexact(dtype)
