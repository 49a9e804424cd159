"""`diff`: what differs between two checkpoints. Equal chunks are known by their hashes and not read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perdure.checkpoint.address import (
    StoredCheckpoint,
    Where,
    checkpoint_at,
    find_run,
    open_checkpoint,
)
from perdure.errors import CorruptionError, StepNotFoundError, UnsupportedLeafError
from perdure.look.diff_result import NOTHING, CheckpointDiff, FieldDiff
from perdure.look.leaf_diff import Comparison, LeafDiff, describe, diff_scalars
from perdure.look.leaf_reader import (
    element_dtype,
    element_shape,
    is_scalar,
    read_elements,
    refuse_unused,
)
from perdure.look.manifest_file import is_manifest_file, open_manifest_file
from perdure.look.renames import likely_renames
from perdure.store.format import steps_text
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.selection import Selection
from perdure.text import counted


def diff(
    first: Where,
    second: Where,
    *,
    leaves: str | Iterable[str] | None = None,
    also_look_in: Sequence[str | os.PathLike[str]] = (),
) -> CheckpointDiff:
    """Compare two checkpoints, or two runs at the first common step that differs.

    Only chunks that differ are read. Every figure has the same bits on every machine.

    Args:
        first: As for `open_checkpoint`; two runs without `@` are compared at the first common step
            whose states differ, or at the last common one. For `git difftool` also the path of a
            manifest file, and `os.devnull` for no checkpoint.
        second: As `first`.
        leaves: Only the leaves that these patterns select on either side.
        also_look_in: For manifest files: paths of files whose run directories may have the chunks,
            without which leaves are compared by their hashes.

    Raises:
        StepNotFoundError: The runs have no step in common, or there is no such checkpoint.
        ArgumentError: A pattern selects nothing on either side.
        CorruptionError: A chunk is damaged, or its pack is missing.
        StoreError: As `open_checkpoint`.
    """
    selection = None if leaves is None else Selection(leaves)
    if _is_nothing(first) or _is_nothing(second):
        return _one_sided(first, second, selection, also_look_in)
    a, b, common = _opened(first, second, selection, also_look_in)
    ours, theirs = _leaves(a.manifest, selection), _leaves(b.manifest, selection)
    if selection is not None:
        refuse_unused(selection, sorted({*_paths(a), *_paths(b)}), f"{a.name} and {b.name}")
    both = [(leaf, theirs[path]) for path, leaf in ours.items() if path in theirs]
    differing = [pair for pair in both if not _same(*pair)]
    changed, read = _compare((a, b), differing)
    only = _missing_in(theirs, ours), _missing_in(ours, theirs)
    renames, sampled = likely_renames(a, only[0], b, only[1])
    renamed = {rename.first for rename in renames}, {rename.second for rename in renames}
    recipe, environment = _recipes(a.manifest, b.manifest)
    return CheckpointDiff(
        a.name,
        b.name,
        len(both) - len(differing),
        sum(leaf.nbytes for leaf, _ in both) - sum(leaf.nbytes for leaf, _ in differing),
        changed,
        tuple(leaf.path for leaf in only[0] if leaf.path not in renamed[0]),
        tuple(leaf.path for leaf in only[1] if leaf.path not in renamed[1]),
        tuple(renames),
        recipe,
        environment,
        _fields(a.manifest.metrics, b.manifest.metrics),
        _process_leaves(a.manifest, b.manifest),
        _containers(a.manifest, b.manifest),
        read + sampled,
        common,
    )


def _is_nothing(where: Where) -> bool:
    return isinstance(where, (str, os.PathLike)) and os.fspath(where) == NOTHING


def _one_sided(
    first: Where,
    second: Where,
    selection: Selection | None,
    also_look_in: Sequence[str | os.PathLike[str]],
) -> CheckpointDiff:
    """The result for a checkpoint that one side lacks."""
    is_added = _is_nothing(first)
    checkpoint = _open_side(second if is_added else first, also_look_in)
    paths = tuple(_leaves(checkpoint.manifest, selection))
    if selection is not None:
        refuse_unused(selection, _paths(checkpoint), checkpoint.name)
    if is_added:
        return CheckpointDiff(NOTHING, checkpoint.name, only_second=paths)
    return CheckpointDiff(checkpoint.name, NOTHING, only_first=paths)


def _open_side(where: Where, others: Sequence[str | os.PathLike[str]]) -> StoredCheckpoint:
    """A checkpoint by the path of its manifest file, or by its name."""
    if is_manifest_file(where):
        return open_manifest_file(where, others)  # type: ignore[arg-type]
    return open_checkpoint(where)


def _opened(
    first: Where,
    second: Where,
    selection: Selection | None,
    also_look_in: Sequence[str | os.PathLike[str]],
) -> tuple[StoredCheckpoint, StoredCheckpoint, str]:
    """The two checkpoints to compare, and a sentence on the common steps of two runs."""
    if is_manifest_file(first) or is_manifest_file(second):
        others = [where for where in (second, first) if is_manifest_file(where)]
        others += also_look_in
        return _open_side(first, others), _open_side(second, others), ""  # type: ignore[arg-type]
    addresses = find_run(first), find_run(second)
    if any(address.which is not None for address in addresses):
        return open_checkpoint(first), open_checkpoint(second), ""
    runs = [address.run for address in addresses]
    steps = [run.steps() for run in runs]
    common = sorted(set(steps[0]).intersection(steps[1]))
    if not common:
        listed = (steps_text(held) if held else "no checkpoint" for held in steps)
        has = " and ".join(
            f"{run.where} has {text}" for run, text in zip(runs, listed, strict=True)
        )
        raise StepNotFoundError(
            f"expected two runs with a step in common, found none: {has}. Compare two checkpoints by "
            f"their steps, RUN@STEP."
        )
    for before, step in enumerate(common):
        a, b = (checkpoint_at(address.run, step, address.given) for address in addresses)
        ours, theirs = _leaves(a.manifest, selection), _leaves(b.manifest, selection)
        if ours.keys() != theirs.keys() or not all(_same(ours[p], theirs[p]) for p in ours):
            found = f"{counted(len(common), 'common step', 'common steps')} ({steps_text(common)})"
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


def _missing_in(side: Mapping[str, LeafEntry], other: Mapping[str, LeafEntry]) -> list[LeafEntry]:
    """The leaves of the other side that `side` lacks."""
    return [leaf for path, leaf in other.items() if path not in side]


def _paths(checkpoint: StoredCheckpoint) -> list[str]:
    return [leaf.path for leaf in checkpoint.manifest.leaves]


def _same(first: LeafEntry, second: LeafEntry) -> bool:
    """Whether two leaves have the same dtype, shape and bits, known from their hashes."""
    if (first.dtype, first.shape, first.text) != (second.dtype, second.shape, second.text):
        return False
    return [chunk.hash for chunk in first.chunks] == [chunk.hash for chunk in second.chunks]


def _compare(
    sides: tuple[StoredCheckpoint, StoredCheckpoint],
    pairs: Sequence[tuple[LeafEntry, LeafEntry]],
) -> tuple[tuple[LeafDiff, ...], int]:
    """How each pair of leaves differs, and the bytes that were read for that."""
    found = {ours.path: _without_reading(ours, theirs) for ours, theirs in pairs}
    to_read = [pair for pair in pairs if found[pair[0].path] is None]
    read = 0
    if not any(side.is_loose for side in sides):
        compared, read = _compare_elements(sides, to_read)
        found |= compared
    else:  # chunks may have gone from the run without any damage
        for ours, theirs in to_read:
            try:
                compared, nbytes = _compare_elements(sides, [(ours, theirs)])
                found, read = found | compared, read + nbytes
            except CorruptionError:
                gone = "values not read: chunks are no longer in its run directory"
                found[ours.path] = _problem(ours, theirs, gone)
            except StepNotFoundError:
                alone = "values not read: no run directory is around a manifest"
                found[ours.path] = _problem(ours, theirs, alone)
    return tuple(leaf for leaf in found.values() if leaf is not None), read


def _compare_elements(
    sides: tuple[StoredCheckpoint, StoredCheckpoint],
    pairs: Sequence[tuple[LeafEntry, LeafEntry]],
) -> tuple[dict[str, LeafDiff], int]:
    comparisons = {ours.path: Comparison(ours) for ours, _ in pairs}
    chunks: dict[str, list[int]] = {}
    for ours, theirs in pairs:
        hashes = zip(ours.chunks, theirs.chunks, strict=True)
        chunks[ours.path] = [n for n, (a, b) in enumerate(hashes) if a.hash != b.hash]
    streams = [read_elements(sides[n], [pair[n] for pair in pairs], chunks) for n in (0, 1)]
    read = 0
    for first, second in zip(*streams, strict=True):
        read += first.values.nbytes + second.values.nbytes
        comparisons[first.entry.path].add(first.start, first.values, second.values)
    return {path: comparison.result() for path, comparison in comparisons.items()}, read


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
    missing = object()
    return tuple(
        FieldDiff(name, first.get(name), second.get(name))
        for name in sorted({*first, *second})
        if (type(first.get(name, missing)), first.get(name, missing))
        != (type(second.get(name, missing)), second.get(name, missing))
    )


def _process_leaves(first: Manifest, second: Manifest) -> tuple[str, ...]:
    ours = {leaf.path: leaf for leaf in first.process_leaves}
    theirs = {leaf.path: leaf for leaf in second.process_leaves}
    return tuple(
        path
        for path in sorted({*ours, *theirs})
        if path not in ours or path not in theirs or not _same(ours[path], theirs[path])
    )


def _containers(first: Manifest, second: Manifest) -> tuple[str, ...]:
    ours, theirs = first.containers, second.containers
    return tuple(path for path in sorted({*ours, *theirs}) if ours.get(path) != theirs.get(path))
