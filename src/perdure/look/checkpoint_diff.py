"""`diff`: what differs between two checkpoints. Equal chunks are known by their hashes and not read."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import product
from typing import Any

from perdure.checkpoint.address import (
    StoredCheckpoint,
    Where,
    checkpoint_at,
    find_run,
    open_checkpoint,
)
from perdure.errors import StepNotFoundError, UnsupportedLeafError
from perdure.look.leaf_diff import (
    CheckpointDiff,
    Comparison,
    FieldDiff,
    LeafDiff,
    Rename,
    diff_scalars,
)
from perdure.look.leaf_reader import (
    describe,
    element_dtype,
    element_shape,
    is_scalar,
    read_elements,
    refuse_unused,
)
from perdure.store.format import steps_text
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.selection import Selection
from perdure.text import counted

MOST_CANDIDATES = 256
"""Of more leaves with the same bytes, those at the same place in both orders are paired."""


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
        refuse_unused(selection, sorted(paths), f"{a.name} and {b.name}")
    both = [(leaf, theirs[path]) for path, leaf in ours.items() if path in theirs]
    differing = [pair for pair in both if not _same(*pair)]
    changed, read = _compare((a, b), differing)
    only_first = [leaf for path, leaf in ours.items() if path not in theirs]
    only_second = [leaf for path, leaf in theirs.items() if path not in ours]
    renames = _likely_renames(only_first, only_second)
    renamed = {rename.first for rename in renames}, {rename.second for rename in renames}
    recipe, environment = _recipes(a.manifest, b.manifest)
    process_leaves = [{leaf.path: leaf for leaf in each.manifest.process_leaves} for each in (a, b)]
    return CheckpointDiff(
        a.name,
        b.name,
        equal_leaves=len(both) - len(differing),
        equal_nbytes=sum(leaf.nbytes for leaf, _ in both)
        - sum(leaf.nbytes for leaf, _ in differing),
        changed=changed,
        only_first=tuple(leaf.path for leaf in only_first if leaf.path not in renamed[0]),
        only_second=tuple(leaf.path for leaf in only_second if leaf.path not in renamed[1]),
        renames=renames,
        recipe=recipe,
        environment=environment,
        metrics=_fields(a.manifest.metrics, b.manifest.metrics),
        process_leaves=_unequal(*process_leaves, same=_same),
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
    for before, step in enumerate(common):
        a, b = (checkpoint_at(address.run, step, address.given) for address in addresses)
        ours, theirs = _leaves(a.manifest, selection), _leaves(b.manifest, selection)
        if ours.keys() != theirs.keys() or not all(_same(ours[p], theirs[p]) for p in ours):
            found = f"{counted(len(common), 'common step')} ({steps_text(common)})"
            verb = "is" if before == 1 else "are"
            return a, b, f"of {found}, {before} before this one {verb} equal"
    a, b = (checkpoint_at(address.run, common[-1], address.given) for address in addresses)
    if len(common) == 1:
        return a, b, "the only common step is equal"
    return a, b, f"all {len(common)} common steps are equal; the last one is shown"


def _leaves(manifest: Manifest, selection: Selection | None) -> dict[str, LeafEntry]:
    return {
        leaf.path: leaf
        for leaf in manifest.leaves
        if selection is None or selection.matches(leaf.path)
    }


def _same(first: LeafEntry, second: LeafEntry) -> bool:
    """Whether two leaves have the same dtype, shape and bits, known from their hashes."""
    if (first.dtype, first.shape, first.text) != (second.dtype, second.shape, second.text):
        return False
    return first.text is not None or first.hashes() == second.hashes()


def _compare(
    sides: tuple[StoredCheckpoint, StoredCheckpoint], pairs: Sequence[tuple[LeafEntry, LeafEntry]]
) -> tuple[tuple[LeafDiff, ...], int]:
    """How each pair of leaves differs, and the bytes that were read for that."""
    found = {ours.path: _without_reading(ours, theirs) for ours, theirs in pairs}
    to_read = [pair for pair in pairs if found[pair[0].path] is None]
    comparisons = {ours.path: Comparison(ours) for ours, _ in to_read}
    chunks: dict[str, list[int]] = {}
    for ours, theirs in to_read:
        hashes = zip(ours.chunks, theirs.chunks, strict=True)
        chunks[ours.path] = [n for n, (a, b) in enumerate(hashes) if a.hash != b.hash]
    streams = [read_elements(sides[n], [pair[n] for pair in to_read], chunks) for n in (0, 1)]
    read = 0
    for first, second in zip(*streams, strict=True):
        read += first.values.nbytes + second.values.nbytes
        comparisons[first.entry.path].add(first.start, first.values, second.values)
    return tuple(leaf or comparisons[path].result() for path, leaf in found.items()), read


def _without_reading(ours: LeafEntry, theirs: LeafEntry) -> LeafDiff | None:
    """The difference of a pair whose elements cannot be compared one by one."""
    try:
        if is_scalar(ours) and is_scalar(theirs):
            return diff_scalars(ours, theirs)
        if (ours.dtype, ours.shape, ours.nbytes) != (theirs.dtype, theirs.shape, theirs.nbytes):
            kinds = "dtype" if ours.dtype != theirs.dtype else "shape"
            same = ", the same bytes" if ours.hashes() == theirs.hashes() else ""
            return _problem(ours, theirs, f"another {kinds}{same}")
        element_dtype(ours)
    except UnsupportedLeafError as error:
        return _problem(ours, theirs, str(error))
    return None


def _problem(ours: LeafEntry, theirs: LeafEntry, problem: str) -> LeafDiff:
    count = math.prod(element_shape(ours))
    return LeafDiff(ours.path, describe(ours), describe(theirs), count, problem=problem)


def _recipes(
    first: Manifest, second: Manifest
) -> tuple[tuple[FieldDiff, ...], tuple[FieldDiff, ...]]:
    """The fields of the recipe that differ, and those of the environment."""
    fields = _fields(first.recipe, second.recipe)
    if not fields:
        return (), ()
    from perdure.checkpoint.recipe import ENVIRONMENT_FIELDS  # takes long to import

    inside = tuple(field for field in fields if field.name in ENVIRONMENT_FIELDS)
    return tuple(field for field in fields if field not in inside), inside


def _fields(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[FieldDiff, ...]:
    """Entries whose value or type differs."""
    typed = [
        {name: (type(value), value) for name, value in side.items()} for side in (first, second)
    ]
    return tuple(FieldDiff(name, first.get(name), second.get(name)) for name in _unequal(*typed))


def _unequal(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], same: Any = operator.eq
) -> tuple[str, ...]:
    """The paths that only one side has, or whose values are not the same."""
    return tuple(
        path
        for path in sorted({*ours, *theirs})
        if path not in ours or path not in theirs or not same(ours[path], theirs[path])
    )


def _likely_renames(first: Iterable[LeafEntry], second: Iterable[LeafEntry]) -> tuple[Rename, ...]:
    """Leaves of one side each with the same dtype, shape and bytes, paired by similar paths."""
    groups: dict[Any, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, entries in enumerate((first, second)):
        for leaf in entries:
            # The bytes of scalars say little, so their names count.
            name = leaf.path.rpartition("/")[2] if is_scalar(leaf) else ""
            groups[leaf.dtype, leaf.shape, name, *leaf.hashes()][side].append(leaf.path)
    found: dict[str, str] = {}
    for sides in groups.values():
        few = max(map(len, sides)) <= MOST_CANDIDATES
        pairs = product(*sides) if few else zip(*sides, strict=False)
        taken: set[str] = set()
        for a, b in sorted(pairs, key=lambda ab: (-SequenceMatcher(None, *ab).ratio(), ab)):
            if a not in found and b not in taken:
                found[a] = b
                taken.add(b)
    return tuple(Rename(a, b) for a, b in sorted(found.items()))
