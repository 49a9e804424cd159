"""How much floating-point leaves changed from one checkpoint to the next.

Leaves with equal chunk hashes are known to be equal and are not read. The others are streamed. A
damaged leaf gets a word in place of numbers, so that the rest is still compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    StepNotFoundError,
    UnreachableError,
    UnsupportedLeafError,
)
from perdure.look.fixed_order import ScaledSum, added, blocks, root_ratio
from perdure.look.leaf_reader import element_dtype, read_elements, select_leaves
from perdure.store.format import WEAK_PREFIX
from perdure.store.manifest import LeafEntry

FLOATS = ("float", "bfloat", "complex")

SAME, NEW, DAMAGED, UNREAD, GONE = "same", "new", "damaged", "unread", "deleted"
"""What stands for a change without numbers: equal bits; no such leaf before, or of another shape or
dtype; damaged; not readable; the checkpoint was deleted meanwhile."""


UNREADABLE = (DAMAGED, UNREAD, GONE)

Problems = dict[int, tuple[str, str]]
"""By step, `damaged` or `unread`, and the reason."""


class Change(NamedTuple):
    """Sums of squares of one leaf: its values before, its values after, and their differences."""

    before: ScaledSum
    after: ScaledSum
    distance: ScaledSum


class LeafPair(NamedTuple):
    """One leaf in two checkpoints."""

    before: LeafEntry
    after: LeafEntry

    @property
    def differing(self) -> set[int]:
        """The numbers of the chunks that differ."""
        hashes = zip(self.before.hashes(), self.after.hashes(), strict=True)
        return {number for number, (before, after) in enumerate(hashes) if before != after}


def float_leaves(
    checkpoint: StoredCheckpoint, leaves: str | Iterable[str] | None = None
) -> dict[str, LeafEntry]:
    """The floating-point arrays of a checkpoint by path; raises as `select_leaves` does."""
    return {
        entry.path: entry
        for entry in select_leaves(checkpoint, leaves)
        if entry.dtype.removeprefix(WEAK_PREFIX).startswith(FLOATS) and _is_known(entry)
    }


def float_leaves_of_each(
    checkpoints: Sequence[StoredCheckpoint], leaves: str | Iterable[str] | None = None
) -> list[dict[str, LeafEntry]]:
    """`float_leaves` of each checkpoint; raises only if the patterns select nothing in any of them."""
    found: list[dict[str, LeafEntry]] = []
    errors: list[ArgumentError] = []
    for checkpoint in checkpoints:
        try:
            found.append(float_leaves(checkpoint, leaves))
        except ArgumentError as error:
            found.append({})
            errors.append(error)
    if errors and len(errors) == len(checkpoints):
        raise errors[-1]
    return found


def leaf_changes(
    before: StoredCheckpoint,
    after: StoredCheckpoint,
    entries: tuple[dict[str, LeafEntry], dict[str, LeafEntry]],
    problems: Problems | None = None,
) -> dict[str, Change | str]:
    """How each leaf of `after` changed since `before`; a word where there are no numbers.

    Args:
        before: A checkpoint.
        after: A later one.
        entries: Their leaves to compare, by path.
        problems: Gets the checkpoints that are found damaged or that cannot be read.
    """
    problems = {} if problems is None else problems
    olds, news = entries
    changes: dict[str, Change | str] = {}
    pairs: list[LeafPair] = []
    for path, new in news.items():
        old = olds.get(path)
        if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            changes[path] = NEW
        elif old.hashes() == new.hashes():
            changes[path] = SAME
        else:
            pairs.append(LeafPair(old, new))
    try:
        for path, change in _compare(before, after, pairs):
            changes[path] = change
    except (CorruptionError, UnreachableError):
        # One by one, to find the leaf: the stream read ahead, so the error names no place in it.
        word: Change | str = SAME
        for pair in pairs:
            if pair.after.path not in changes:
                if word != UNREAD:  # a storage that does not answer is not asked for every leaf
                    word = _compare_one(before, after, pair, problems)
                changes[pair.after.path] = word
    except StepNotFoundError:
        changes.update((pair.after.path, GONE) for pair in pairs if pair.after.path not in changes)
    return changes


def squared_norms(
    checkpoint: StoredCheckpoint, entries: Iterable[LeafEntry]
) -> dict[str, ScaledSum]:
    """The sum of the squares of each leaf; raises as `read_elements` does."""
    entries = list(entries)
    sums = {entry.path: ScaledSum() for entry in entries}
    for part in read_elements(checkpoint, entries):
        _add_squares(sums[part.entry.path], _real(part.values))
    return sums


def change_ratio(changes: Iterable[Change | str]) -> float | str:
    """The relative change of several leaves together: the norm of the differences over that before.

    Only the leaves that changed count. A word where there is no number: `damaged` if any leaf is,
    `same` if none changed, `from zero` if all values were zero before, `not finite`.
    """
    changes = list(changes)
    words = {change for change in changes if isinstance(change, str)}
    for word in UNREADABLE:
        if word in words:
            return word
    numbers = [change for change in changes if isinstance(change, Change)]
    if not numbers:
        return NEW if NEW in words else SAME
    distance = added(change.distance for change in numbers)
    before = added(change.before for change in numbers)
    if not (math.isfinite(distance.value) and math.isfinite(before.value)):
        return "not finite"
    ratio = root_ratio(distance, before) if before.value else None
    return "from zero" if ratio is None else ratio


def norm_history(
    checkpoints: Sequence[StoredCheckpoint],
    leaves: str | Iterable[str] | None = None,
    problems: Problems | None = None,
) -> tuple[list[dict[str, ScaledSum]], list[dict[str, Change | str]]]:
    """The squared norms of the leaves of each checkpoint, and the changes from each to the next.

    A leaf is read again only if it changed. Raises as `read_elements` does if a leaf that never changed
    is damaged; one that is damaged and changed has no norm there.

    Args:
        checkpoints: Readable checkpoints of one run, oldest first.
        leaves: A pattern, or several; all leaves by default.
        problems: Gets the checkpoints that are found damaged or that cannot be read.
    """
    problems = {} if problems is None else problems
    entries = float_leaves_of_each(checkpoints, leaves)
    norms: list[dict[str, ScaledSum]] = [{} for _ in checkpoints]
    changes: list[dict[str, Change | str]] = []
    for number, (before, after) in enumerate(pairwise(checkpoints)):
        found = leaf_changes(before, after, (entries[number], entries[number + 1]), problems)
        changes.append(found)
        for path, change in found.items():
            if isinstance(change, Change):
                norms[number][path], norms[number + 1][path] = change.before, change.after
    for number in reversed(range(len(changes))):  # equal leaves have equal norms
        _spread(norms[number + 1], norms[number], changes[number])
    bad = {path for found in changes for path, change in found.items() if change in UNREADABLE}
    for number, checkpoint in enumerate(checkpoints):
        if number:
            _spread(norms[number - 1], norms[number], changes[number - 1])
        missing = [entry for path, entry in entries[number].items() if path not in norms[number]]
        norms[number].update(
            squared_norms(checkpoint, [entry for entry in missing if entry.path not in bad])
        )
        doubtful = [entry for entry in missing if entry.path in bad]
        norms[number].update(_readable_norms(checkpoint, doubtful, problems))
    return norms, changes


def _readable_norms(
    checkpoint: StoredCheckpoint, entries: Iterable[LeafEntry], problems: Problems
) -> dict[str, ScaledSum]:
    """`squared_norms` of the leaves that can be read, one by one; for the others, why they cannot."""
    norms: dict[str, ScaledSum] = {}
    for entry in entries:
        try:
            norms |= squared_norms(checkpoint, [entry])
        except CorruptionError as error:
            problems.setdefault(checkpoint.step, (DAMAGED, str(error)))
        except UnreachableError as error:
            problems.setdefault(checkpoint.step, (UNREAD, str(error)))
            break  # a storage that does not answer is not asked for every leaf
        except StepNotFoundError:  # deleted meanwhile
            break
    return norms


def _spread(
    known: dict[str, ScaledSum], other: dict[str, ScaledSum], changes: dict[str, Any]
) -> None:
    """Take the norms of leaves that did not change from the checkpoint beside."""
    for path, change in changes.items():
        if change == SAME and path in known:
            other.setdefault(path, known[path])


def _compare_one(
    before: StoredCheckpoint, after: StoredCheckpoint, pair: LeafPair, problems: Problems
) -> Change | str:
    try:
        [(_, change)] = _compare(before, after, [pair])
        return change
    except (CorruptionError, UnreachableError) as error:
        word = _word(error)
    except StepNotFoundError:
        return GONE
    for checkpoint, entry in ((before, pair.before), (after, pair.after)):
        try:
            squared_norms(checkpoint, [entry])
        except (CorruptionError, UnreachableError) as error:
            problems.setdefault(checkpoint.step, (_word(error), str(error)))
        except StepNotFoundError:
            continue
    return word


def _word(error: CorruptionError | UnreachableError) -> str:
    return DAMAGED if isinstance(error, CorruptionError) else UNREAD


def _compare(
    before: StoredCheckpoint, after: StoredCheckpoint, pairs: Sequence[LeafPair]
) -> Iterator[tuple[str, Change]]:
    """The change of each pair: all chunks of `before` are read, and those of `after` that differ."""
    if not pairs:
        return
    differing = {pair.after.path: pair.differing for pair in pairs}
    wanted = {path: sorted(numbers) for path, numbers in differing.items()}
    counts = {pair.before.path: len(pair.before.chunks) for pair in pairs}
    with (
        closing(_iterator(read_elements(before, [pair.before for pair in pairs]))) as olds,
        closing(_iterator(read_elements(after, [p.after for p in pairs], wanted))) as news,
    ):
        for pair in pairs:
            change = Change(ScaledSum(), ScaledSum(), ScaledSum())
            for number in range(counts[pair.before.path]):
                old = new = _real(next(olds).values)
                _add_squares(change.before, old)
                if number in differing[pair.after.path]:
                    new = _real(next(news).values)
                    _add_distance(change.distance, old, new)
                _add_squares(change.after, new)
            yield pair.after.path, change


def _iterator(elements: Iterator[Any]) -> Any:
    """The same; `read_elements` is a generator, which can be closed."""
    return elements


def _real(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements as float64; a complex number is two of them."""
    if values.dtype.kind == "c":
        return values.astype("complex128").view("float64")
    return values.astype("float64")


def _add_squares(total: ScaledSum, values: np.ndarray[Any, Any]) -> None:
    """Add the squares of numbers; NaN and infinities make the sum so."""
    with np.errstate(over="ignore", invalid="ignore"):
        for (block,) in blocks(values):
            total.add(block, block)


def _add_distance(total: ScaledSum, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> None:
    """Add the squares of the differences of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        for before, after in blocks(old, new):
            distance, halvings = after - before, 0
            if np.isinf(
                distance
            ).any():  # of two finite numbers it may be above the largest float64
                distance, halvings = after / 2 - before / 2, 1
            squares = ScaledSum()
            squares.add(distance, distance)
            total.merge(squares.value, squares.exponent + 2 * halvings)


def _is_known(entry: LeafEntry) -> bool:
    try:
        element_dtype(entry)
    except UnsupportedLeafError:
        return False
    return True
