"""`average`: the weighted mean of checkpoints, as a new run directory.

Invariant: the bits depend on the checkpoints and their weights only. Sums run in float64, one source
after the other in a fixed order, element by element, and are rounded once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from perdure.checkpoint.address import StoredCheckpoint, Where, open_checkpoint, open_checkpoints
from perdure.convert.average_weights import (
    checked_weights,
    ema_weights,
    scaled_weights,
    schedule_weights,
)
from perdure.errors import ArgumentError, MismatchError, UnsupportedLeafError
from perdure.look.leaf_diff import describe
from perdure.look.leaf_reader import (
    chunks_in_order,
    element_dtype,
    is_scalar,
    read_elements,
    select_leaves,
    streamed,
)
from perdure.look.origins import ORIGIN, source_of
from perdure.look.tables import Shown, Table
from perdure.store import Run, Storage
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.streamed_save import (
    StreamedLeaf,
    new_run,
    pack_order,
    save_streamed,
    text_leaf,
)
from perdure.text import counted

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, repr=False)
class Averaged(Shown):
    """What `average` made.

    Attributes:
        run: The new run directory.
        manifest: Its checkpoint.
        sources: (checkpoint, weight), in the order of the sum.
        averaged: Paths of the leaves that were averaged.
        equal: Paths of selected leaves that are equal in all sources, and were taken as they are.
        taken: Paths of the leaves that were taken from `like`.
        like: The checkpoint that other leaves come from.
    """

    run: str
    manifest: Manifest
    sources: tuple[tuple[StoredCheckpoint, float], ...]
    averaged: tuple[str, ...]
    equal: tuple[str, ...]
    taken: tuple[str, ...]
    like: StoredCheckpoint

    def _blocks(self) -> list[str | Table]:
        rows = [(checkpoint.name, format(weight, ".12g")) for checkpoint, weight in self.sources]
        averaged = f"{counted(len(self.averaged), 'leaf', 'leaves')} averaged"
        taken = f"{len(self.taken)} taken from {self.like.name}"
        return [
            Table(("checkpoint", "weight"), rows),
            f"{averaged}, {len(self.equal)} equal in all, {taken}",
            f"{self.run} starts at step {self.manifest.step}, fingerprint {self.manifest.fingerprint}",
        ]


def average(
    checkpoints: str | os.PathLike[str] | Run | StoredCheckpoint | Iterable[Where],
    out: str | os.PathLike[str] | Storage,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    schedule: str = "uniform",
    leaves: str | Iterable[str] | None = None,
    like: Where | None = None,
) -> Averaged:
    """Average checkpoints into the new run directory `out`, whose only step is that of `like`.

    Floating-point and complex arrays are averaged: `sum(weight * value) / sum(weight)` in float64, in
    the order of the steps, rounded once to the dtype of the leaf; infinite if the mean is above its
    largest number. All other leaves (integers, booleans,
    Python scalars, random keys), and leaves that `leaves` does not select, are those of `like`, and so
    are the recipe and the random generators of each process. The result has one fingerprint, whatever
    the order of the arguments. It takes about 100 MiB of memory, whatever the size.

    Args:
        checkpoints: At least two checkpoints: `RUN@100,200,300`, or several, as for `open_checkpoint`.
        out: An empty or missing directory.
        weights: One number for each checkpoint, in the order of `checkpoints`. They are divided by
            their sum.
        ema: The decay of an exponential moving average over the checkpoints by their steps.
        schedule: "uniform", "linear", "cosine" or "sqrt"; see `average_weights.schedule_weights`.
        leaves: Paths or patterns of the leaves to average; all by default.
        like: The checkpoint that the other leaves come from; by default that of the highest step.

    Raises:
        ArgumentError: The weights do not fit, or a pattern selects nothing that can be averaged.
        MismatchError: A leaf differs in dtype or shape, or a checkpoint lacks it.
        StepExistsError: `out` has checkpoints.
        StepNotFoundError, CorruptionError, UnreachableError: A checkpoint cannot be read.
        SaveError: `out` cannot be written to.
    """
    sources, method = _weighted(_open_all(checkpoints), weights, ema, schedule)
    base = sources[-1][0] if like is None else open_checkpoint(like)
    opened = [checkpoint for checkpoint, _ in sources]
    patterns = None if leaves is None else [leaves] if isinstance(leaves, str) else list(leaves)
    averaged, equal = _split(opened, base, patterns)
    chosen = {*averaged, *equal}
    taken = [entry.path for entry in base.manifest.leaves if entry.path not in chosen]
    run = new_run(out, [checkpoint.run.storage for checkpoint in [*opened, base]])
    with run:
        origin = _origin(sources, base, method, patterns)
        manifest = save_streamed(
            run,
            base.step,
            [*_mean_leaves(sources, averaged), *_copied(opened[-1], equal), *_copied(base, taken)],
            recipe=base.manifest.recipe,
            containers=base.manifest.containers,
            process_leaves=[
                *_copied(base, [entry.path for entry in _process_entries(base)]),
                text_leaf(ORIGIN, "py:str", origin),
            ],
        )
        return Averaged(
            run.where, manifest, tuple(sources), tuple(averaged), tuple(equal), tuple(taken), base
        )


def _open_all(
    checkpoints: str | os.PathLike[str] | Run | StoredCheckpoint | Iterable[Where],
) -> list[StoredCheckpoint]:
    if isinstance(checkpoints, (str, os.PathLike, Run, StoredCheckpoint)):
        checkpoints = [checkpoints]
    return [one for where in checkpoints for one in open_checkpoints_at(where)]


def _origin(
    sources: Sequence[tuple[StoredCheckpoint, float]],
    base: StoredCheckpoint,
    method: str,
    patterns: list[str] | None,
) -> str:
    """The note in the manifest on what the average was made from."""
    note = {
        "made_by": "average",
        "method": method,
        "leaves": patterns,
        "sources": [source_of(checkpoint) | {"weight": weight} for checkpoint, weight in sources],
        "like": source_of(base),
    }
    return json.dumps(note)


def open_checkpoints_at(where: Where) -> list[StoredCheckpoint]:
    """The checkpoints of `RUN@100,200`; of `RUN` alone the newest."""
    several = isinstance(where, (str, os.PathLike)) and "," in os.fsdecode(where).rpartition("@")[2]
    return open_checkpoints(where) if several else [open_checkpoint(where)]


def _weighted(
    found: list[StoredCheckpoint],
    weights: Sequence[float] | None,
    ema: float | None,
    schedule: str,
) -> tuple[list[tuple[StoredCheckpoint, float]], str]:
    """The checkpoints with their weights in the order of the sum, and the name of the method."""
    if len(found) < 2:
        raise ArgumentError(f"average: expected two checkpoints or more, found {len(found)}.")
    if (weights is not None) + (ema is not None) + (schedule != "uniform") > 1:
        raise ArgumentError("average: expected one of weights, ema and schedule, found several.")
    if weights is not None:
        pairs = zip(found, checked_weights(weights, len(found)), strict=True)
        return sorted(pairs, key=lambda pair: (*_order(pair[0]), pair[1])), "weights"
    ordered = sorted(found, key=_order)
    if ema is None and schedule == "uniform":
        return [(checkpoint, 1.0) for checkpoint in ordered], schedule
    steps = [checkpoint.step for checkpoint in ordered]
    if twice := [step for step, later in pairwise(steps) if step == later]:
        raise ArgumentError(
            f"average: this method orders the checkpoints by step, and step {twice[0]} is there twice. "
            f"Name each step once, or give weights."
        )
    if ema is not None:
        values, method = ema_weights(len(ordered), ema), f"ema {ema}"
    else:
        values, method = schedule_weights(len(ordered), schedule), schedule
    return list(zip(ordered, values, strict=True)), method


def _order(checkpoint: StoredCheckpoint) -> tuple[int, str]:
    return checkpoint.step, checkpoint.manifest.fingerprint


def _split(
    sources: list[StoredCheckpoint], base: StoredCheckpoint, patterns: list[str] | None
) -> tuple[list[str], list[str]]:
    """The paths to average, and those of floating-point leaves that are equal in all sources."""
    tables = [_by_path(checkpoint.manifest.leaves) for checkpoint in sources]
    selected = [entry for entry in select_leaves(base, patterns) if _can_be_averaged(entry)]
    averaged: list[str] = []
    equal: list[str] = []
    for entry in sorted(selected, key=lambda entry: pack_order(entry.nbytes, entry.path)):
        entries = []
        for checkpoint, table in zip(sources, tables, strict=True):
            other = table.get(entry.path)
            if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
                raise MismatchError(
                    f"leaf {entry.path!r} is {describe(entry)} in {base.name} and "
                    f"{'missing' if other is None else describe(other)} in {checkpoint.name}; "
                    f"expected the same dtype and shape in all. Select what to average without it: "
                    f"`--leaves`."
                )
            entries.append(other)
        same = all(other.hashes() == entries[0].hashes() for other in entries)
        (equal if same else averaged).append(entry.path)
    if not averaged and not equal:
        raise ArgumentError(
            f"{base.name}: no selected leaf is an array of floating-point numbers, so there is nothing "
            f"to average."
        )
    return averaged, equal


def _can_be_averaged(entry: LeafEntry) -> bool:
    if is_scalar(entry):
        return False
    try:
        return is_inexact(element_dtype(entry))
    except UnsupportedLeafError:
        return False  # taken from `like`, as its bytes are


def _mean_leaves(
    sources: Sequence[tuple[StoredCheckpoint, float]], paths: list[str]
) -> list[StreamedLeaf]:
    """The leaves of the mean. Their chunks are read in the order of `paths`."""
    tables = [_by_path(checkpoint.manifest.leaves) for checkpoint, _ in sources]
    # Read ahead less from each of many sources, so that the memory stays the same.
    ahead = max(1, 8 // len(sources))
    streams = [
        read_elements(checkpoint, [table[path] for path in paths], ahead=ahead)
        for (checkpoint, _), table in zip(sources, tables, strict=True)
    ]
    weights = scaled_weights([weight for _, weight in sources])
    total = math.fsum(weights)

    def mean_of(entry: LeafEntry) -> Iterator[memoryview]:
        dtype = element_dtype(entry)
        for _ in entry.chunks:
            parts = (next(stream).values for stream in streams)
            yield _mean(parts, weights, total, dtype)

    entries = [tables[-1][path] for path in paths]
    return [streamed(entry, mean_of) for entry in entries]


def _mean(
    parts: Iterator[np.ndarray[Any, Any]], weights: list[float], total: float, dtype: np.dtype[Any]
) -> memoryview:
    """`sum(weight * part) / total`, added from the first to the last; as bytes of `dtype`.

    Where the sum of numbers in float64 is above the largest one, it is that of numbers divided by a
    power of two, which no mean with positive weights overflows.
    """
    import numpy as np

    real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    is_wide = real.itemsize == 8  # numbers of other dtypes have no such sums
    scale = math.frexp(math.fsum(map(abs, weights)))[1]
    added: np.ndarray[Any, Any] | None = None
    small: Any = 0.0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for part, weight in zip(parts, weights, strict=True):
            values = part.view(real).astype(np.float64)
            if is_wide:
                small = small + values * math.ldexp(weight, -scale)
            values *= weight
            added = values if added is None else np.add(added, values, out=added)
        assert added is not None, "there are two sources or more"
        added /= total
        if is_wide:
            small /= math.ldexp(total, -scale)
            added = np.where(np.isfinite(added), added, small)
    return round_once(added, real).view(np.uint8).data


def _copied(checkpoint: StoredCheckpoint, paths: Iterable[str]) -> list[StreamedLeaf]:
    """Leaves of one checkpoint as they are."""
    table = _by_path(checkpoint.manifest.every_leaf())
    ordered = sorted(paths, key=lambda path: pack_order(table[path].nbytes, path))
    entries = [table[path] for path in ordered]
    chunks_of = chunks_in_order(checkpoint, entries)
    return [streamed(entry, chunks_of) for entry in entries]


def _process_entries(checkpoint: StoredCheckpoint) -> list[LeafEntry]:
    return [entry for entry in checkpoint.manifest.process_leaves if entry.path != ORIGIN]


def _by_path(entries: Iterable[LeafEntry]) -> dict[str, LeafEntry]:
    return {entry.path: entry for entry in entries}


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether the values of a dtype are floating-point numbers, real or complex."""
    return dtype.kind in "fc" or dtype.name.startswith(("float", "bfloat"))


def round_once(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """`values` (float64) in a real floating-point dtype; every NaN becomes the positive quiet one.

    ml_dtypes converts float64 by way of float32 and so rounds twice. Here the first conversion rounds
    to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008): the last bit of
    the float32 is 1 if it is not exact, which cannot end in a wrong tie.
    """
    import numpy as np

    values = np.where(np.isnan(values), np.nan, values)  # processors differ in the sign of new NaNs
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype.type.__module__ == "numpy":
            return values.astype(dtype)
        near = values.astype(np.float32)
        back = near.astype(np.float64)
        inexact = (back != values) & np.isfinite(near)
        bits = near.view(np.uint32)
        # Beyond the exact value: one step back towards zero, then the last bit is set.
        bits -= (inexact & (np.abs(back) > np.abs(values))).astype(np.uint32)
        bits |= inexact.astype(np.uint32)
        return near.astype(dtype)
