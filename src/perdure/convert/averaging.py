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
from typing import Any

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint, Where, open_checkpoint, open_checkpoints
from perdure.errors import ArgumentError, MismatchError
from perdure.look import leaf_reader
from perdure.look.numerics import parts_dtype
from perdure.look.tables import Shown, Table
from perdure.store import Run, Storage
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.streamed_save import StreamedLeaf, new_run, pack_order, save_streamed, text_leaf
from perdure.text import counted

_Weighted = Sequence[tuple[StoredCheckpoint, float]]


@dataclass(frozen=True, repr=False)
class Averaged(Shown):
    """What `average` made, and of which leaves: averaged, `equal` in all, taken from `like`."""

    run: str
    manifest: Manifest
    sources: tuple[tuple[StoredCheckpoint, float], ...]
    averaged: tuple[str, ...]
    equal: tuple[str, ...]
    taken: tuple[str, ...]
    like: StoredCheckpoint

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "step": self.manifest.step,
            "fingerprint": self.manifest.fingerprint,
            "averaged": list(self.averaged),
            "equal": list(self.equal),
            "taken": list(self.taken),
            **(leaf_reader.origin(self.manifest) or {}),
        }

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
    leaves: str | Iterable[str] | None = None,
    like: Where | None = None,
) -> Averaged:
    """Average checkpoints into the new run directory `out`, whose only step is that of `like`.

    Floating-point and complex arrays are averaged: `sum(weight * value) / sum(weight)` in float64, in
    the order of the steps, rounded once to the dtype of the leaf; infinite if the mean is above its
    largest number. All other leaves, the recipe and the random generators of each process are those of
    `like`. The result has one fingerprint, whatever the order of the arguments. It takes about 100 MiB
    of memory, whatever the size.

    Args:
        checkpoints: At least two checkpoints: `RUN@100,200,300`, or several, as for `open_checkpoint`.
        out: An empty or missing directory.
        weights: One number for each checkpoint, in the order of `checkpoints`, all equal by default.
            They are divided by their sum.
        leaves: Paths or patterns of the leaves to average; all by default.
        like: The checkpoint that the other leaves come from; by default that of the highest step.

    Raises:
        ArgumentError: The weights do not fit, or a pattern selects nothing that can be averaged.
        MismatchError: A leaf differs in dtype or shape, or a checkpoint lacks it.
        StepExistsError: `out` has checkpoints.
        StepNotFoundError, CorruptionError, UnreachableError: A checkpoint cannot be read.
        SaveError: `out` cannot be written to.
    """
    sources = _weighted(_opened(checkpoints), weights)
    base = sources[-1][0] if like is None else open_checkpoint(like)
    opened = [checkpoint for checkpoint, _ in sources]
    patterns = None if leaves is None else [leaves] if isinstance(leaves, str) else list(leaves)
    averaged, equal = _split(opened, base, patterns)
    taken = sorted({leaf.path for leaf in base.manifest.leaves} - {*averaged, *equal})
    processes = [
        leaf.path for leaf in base.manifest.process_leaves if leaf.path != leaf_reader.ORIGIN
    ]
    note = {
        "made_by": "average",
        "leaves": patterns,
        "sources": [_named(checkpoint) | {"weight": weight} for checkpoint, weight in sources],
        "like": _named(base),
    }
    with new_run(
        out, "an average", [checkpoint.run.storage for checkpoint in [*opened, base]]
    ) as run:
        manifest = save_streamed(
            run,
            base.step,
            [*_mean_leaves(sources, averaged), *_copied(opened[-1], equal), *_copied(base, taken)],
            recipe=base.manifest.recipe,
            containers=base.manifest.containers,
            process_leaves=[
                *_copied(base, processes),
                text_leaf(leaf_reader.ORIGIN, "py:str", json.dumps(note)),
            ],
        )
        return Averaged(
            run.where, manifest, tuple(sources), tuple(averaged), tuple(equal), tuple(taken), base
        )


def _opened(
    checkpoints: str | os.PathLike[str] | Run | StoredCheckpoint | Iterable[Where],
) -> list[StoredCheckpoint]:
    """Each checkpoint of `RUN@100,200`; of `RUN` alone the newest."""
    if isinstance(checkpoints, (str, os.PathLike, Run, StoredCheckpoint)):
        checkpoints = [checkpoints]
    found: list[StoredCheckpoint] = []
    for where in checkpoints:
        is_text = isinstance(where, (str, os.PathLike))
        several = is_text and "," in os.fsdecode(where).rpartition("@")[2]
        found += open_checkpoints(where) if several else [open_checkpoint(where)]
    return found


def _named(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {"run": checkpoint.run.where, "step": manifest.step, "fingerprint": manifest.fingerprint}


def _weighted(found: list[StoredCheckpoint], weights: Sequence[float] | None) -> _Weighted:
    if len(found) < 2:
        raise ArgumentError(f"average: expected two checkpoints or more, found {len(found)}.")
    given = [1.0] * len(found) if weights is None else weights
    try:
        values = [float(weight) for weight in given]
        is_usable = len(values) == len(found) and 0 < math.fsum(values) < math.inf
    except (TypeError, ValueError, OverflowError):  # no number, or a sum above every float64
        values, is_usable = [], False
    if not is_usable:
        raise ArgumentError(
            f"weights: expected a finite number for each of the {len(found)} checkpoints, in their "
            f"order, whose sum is above 0 and finite, found {len(given)}: {', '.join(map(str, given))}."
        )
    return sorted(
        zip(found, values, strict=True),
        key=lambda pair: (pair[0].step, pair[0].manifest.fingerprint, pair[1]),
    )


def _split(
    sources: list[StoredCheckpoint], base: StoredCheckpoint, patterns: list[str] | None
) -> tuple[list[str], list[str]]:
    """The paths to average, and those of floating-point leaves that are equal in all sources."""
    tables = [_by_path(checkpoint) for checkpoint in sources]
    averaged: list[str] = []
    equal: list[str] = []
    for entry in _in_pack_order(leaf_reader.select_leaves(base, patterns)):
        if not leaf_reader.is_floating(entry):
            continue
        entries = []
        for checkpoint, table in zip(sources, tables, strict=True):
            other = table.get(entry.path)
            if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
                found = "missing" if other is None else leaf_reader.describe(other)
                raise MismatchError(
                    f"leaf {entry.path!r} is {leaf_reader.describe(entry)} in {base.name} and {found} "
                    f"in {checkpoint.name}; expected one dtype and shape. Leave it out: `--leaves`."
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


def _mean_leaves(sources: _Weighted, paths: list[str]) -> list[StreamedLeaf]:
    """The leaves of the mean. Their chunks are read in the order of `paths`."""
    tables = [_by_path(checkpoint) for checkpoint, _ in sources]
    # Read ahead less from each of many sources, so that the memory stays the same.
    ahead = max(1, 8 // len(sources))
    streams = [
        leaf_reader.read_elements(checkpoint, [table[path] for path in paths], ahead=ahead)
        for (checkpoint, _), table in zip(sources, tables, strict=True)
    ]
    # A power of two, which changes no bit of the mean: now no sum of finite numbers overflows.
    exponent = math.frexp(math.fsum(abs(weight) for _, weight in sources))[1]
    weights = [math.ldexp(weight, -exponent) for _, weight in sources]

    def mean_of(entry: LeafEntry) -> Iterator[memoryview]:
        dtype = leaf_reader.element_dtype(entry)
        for _ in entry.chunks:
            yield _mean((next(stream).values for stream in streams), weights, dtype)

    return [_streamed(tables[-1][path], mean_of) for path in paths]


def _mean(parts: Iterator[np.ndarray[Any, Any]], weights: list[float], dtype: Any) -> memoryview:
    """`sum(weight * part) / sum(weight)`, added from the first to the last; as bytes of `dtype`."""
    real = parts_dtype(dtype)
    added: Any = None
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for part, weight in zip(parts, weights, strict=True):
            term = part.view(real).astype(np.float64) * weight
            added = term if added is None else added + term  # 0.0 + -0.0 would lose a sign
        added /= math.fsum(weights)
    return round_once(added, real).view(np.uint8).data


def _copied(checkpoint: StoredCheckpoint, paths: Iterable[str]) -> list[StreamedLeaf]:
    table = _by_path(checkpoint)
    entries = _in_pack_order(table[path] for path in paths)
    chunks_of = leaf_reader.chunks_in_order(checkpoint, entries)
    return [_streamed(entry, chunks_of) for entry in entries]


def _streamed(entry: LeafEntry, chunks_of: Any) -> StreamedLeaf:
    nbytes = 0 if entry.text is not None else entry.nbytes
    return StreamedLeaf(
        entry.path, entry.dtype, entry.shape, nbytes, lambda: chunks_of(entry), entry.text
    )


def _in_pack_order(entries: Iterable[LeafEntry]) -> list[LeafEntry]:
    return sorted(entries, key=lambda entry: pack_order(entry.nbytes, entry.path))


def _by_path(checkpoint: StoredCheckpoint) -> dict[str, LeafEntry]:
    return {entry.path: entry for entry in checkpoint.manifest.every_leaf()}


def round_once(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """`values` (float64) in a real floating-point dtype; every NaN becomes the positive quiet one.

    ml_dtypes converts by way of float32 and so rounds twice: the first conversion rounds to odd
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
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
