"""How much floating-point leaves, and the layers that they form, changed between checkpoints.

Leaves with equal chunk hashes are known to be equal and are not read. The others are streamed. A leaf
that is damaged or cannot be read has a word in place of numbers, so that the rest is still compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    StepNotFoundError,
    UnreachableError,
    UnsupportedLeafError,
)
from perdure.look.elements import as_float64, parts_dtype
from perdure.look.fixed_order import ScaledSum, added, blocks, root_ratio
from perdure.look.leaf_reader import element_dtype, read_elements, select_leaves
from perdure.look.tables import natural_key
from perdure.store.format import WEAK_PREFIX
from perdure.store.manifest import LeafEntry

FLOATS = ("float", "bfloat", "complex")

SAME, NEW, DAMAGED, UNREAD, GONE = "same", "new", "damaged", "unread", "deleted"
"""What stands for a change without numbers: equal bits; no such leaf before, or of another shape or
dtype; damaged; not readable; the checkpoint was deleted meanwhile."""

UNREADABLE = (DAMAGED, UNREAD, GONE)

MOST_COLUMNS = 24
MOST_ROWS = 40

Problems = dict[int, tuple[str, str]]
"""By step, `damaged` or `unread`, and the reason."""

_Value = TypeVar("_Value")
_Entries = dict[str, LeafEntry]


class Change(NamedTuple):
    """Sums of squares of one leaf: its values before, its values after, and their differences."""

    before: ScaledSum
    after: ScaledSum
    distance: ScaledSum


def changes_document(
    checkpoints: Sequence[StoredCheckpoint],
    leaves: str | Iterable[str] | None,
    problems: Problems,
) -> dict[str, Any]:
    """The relative change of each layer from one checkpoint to the next, in plain values.

    A layer is the leaves with the same first parts of their path, as many parts as give at most 40
    layers. Of more than 25 checkpoints, 25 are compared, spread evenly.

    Args:
        checkpoints: Readable checkpoints of one run, oldest first.
        leaves: A pattern, or several; all leaves by default.
        problems: Gets the checkpoints that are found damaged or that cannot be read.

    Raises:
        ArgumentError: A pattern selects nothing.
    """
    last, most = len(checkpoints) - 1, MOST_COLUMNS
    shown = range(last + 1) if last <= most else [n * last // most for n in range(most + 1)]
    chosen = [checkpoints[n] for n in shown]
    entries = _float_leaves(chosen, leaves)
    layers = layers_of(path for each in entries for path in each)
    columns = [
        {layer: change_ratio(found) for layer, found in grouped(changes, layers).items()}
        for changes in _changes(chosen, entries, problems)
    ]
    names = sorted(set(layers.values()), key=natural_key)
    return {
        "steps": [[before.step, after.step] for before, after in pairwise(chosen)],
        "checkpoints": len(checkpoints),
        "left_out": max(0, len(names) - MOST_ROWS),
        "layers": [
            {"layer": name, "changes": [column.get(name) for column in columns]}
            for name in names[:MOST_ROWS]
        ],
    }


def norm_history(
    checkpoints: Sequence[StoredCheckpoint],
    leaves: str | Iterable[str] | None,
    problems: Problems,
) -> tuple[list[dict[str, ScaledSum]], list[dict[str, Change | str]]]:
    """The squared norms of the leaves of each checkpoint, and the changes from each to the next.

    A leaf is read again only if it changed. Arguments and errors as for `changes_document`. A leaf that
    is damaged in a checkpoint has no norm there.
    """
    entries = _float_leaves(checkpoints, leaves)
    changes = list(_changes(checkpoints, entries, problems))
    norms: list[dict[str, ScaledSum]] = [{} for _ in checkpoints]
    for number, found in enumerate(changes):
        for path, change in found.items():
            if isinstance(change, Change):
                norms[number][path], norms[number + 1][path] = change.before, change.after
    for number in reversed(range(len(changes))):  # equal leaves have equal norms
        _copy_same(norms[number + 1], norms[number], changes[number])
    for number, checkpoint in enumerate(checkpoints):
        if number:
            _copy_same(norms[number - 1], norms[number], changes[number - 1])
        missing = {p: entry for p, entry in entries[number].items() if p not in norms[number]}
        for path, norm in _norms(checkpoint, missing, problems).items():
            if isinstance(norm, ScaledSum):
                norms[number][path] = norm
    return norms, changes


def layers_of(paths: Iterable[str], most: int = MOST_ROWS) -> dict[str, str]:
    """The layer of each leaf: as many first parts of its path as give at most `most` layers."""
    paths = dict.fromkeys(paths)
    depth, deepest = 1, max((path.count("/") + 1 for path in paths), default=1)
    while depth < deepest and len({_head(path, depth + 1) for path in paths}) <= most:
        depth += 1
    return {path: _head(path, depth) for path in paths}


def grouped(values: Mapping[str, _Value], layers: Mapping[str, str]) -> dict[str, list[_Value]]:
    """The values of the leaves of each layer."""
    groups: dict[str, list[_Value]] = {}
    for path, value in values.items():
        groups.setdefault(layers[path], []).append(value)
    return groups


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


def _head(path: str, depth: int) -> str:
    return "/".join(path.split("/")[:depth])


def _float_leaves(
    checkpoints: Sequence[StoredCheckpoint], leaves: str | Iterable[str] | None
) -> list[_Entries]:
    """The floating-point arrays of each checkpoint by path.

    Raises `ArgumentError` only if the patterns select nothing in any of them.
    """
    found: list[_Entries] = []
    errors: list[ArgumentError] = []
    for checkpoint in checkpoints:
        try:
            selected = select_leaves(checkpoint, leaves)
        except ArgumentError as error:
            selected = []
            errors.append(error)
        found.append({entry.path: entry for entry in selected if _is_float(entry)})
    if errors and len(errors) == len(checkpoints):
        raise errors[-1]
    return found


def _is_float(entry: LeafEntry) -> bool:
    try:
        is_known = entry.dtype.removeprefix(WEAK_PREFIX).startswith(FLOATS)
        return is_known and element_dtype(entry) is not None
    except UnsupportedLeafError:
        return False


def _changes(
    checkpoints: Sequence[StoredCheckpoint], entries: Sequence[_Entries], problems: Problems
) -> Iterator[dict[str, Change | str]]:
    """How each leaf changed from each checkpoint to the next; a word where there are no numbers."""
    for (before, after), (olds, news) in zip(pairwise(checkpoints), pairwise(entries), strict=True):
        changes: dict[str, Change | str] = {}
        pairs: _Entries = {}
        for path, new in news.items():
            old = olds.get(path)
            if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
                changes[path] = NEW
            elif old.hashes() == new.hashes():
                changes[path] = SAME
            else:
                pairs[path] = new

        def compared(
            some: _Entries,
            sides: tuple[StoredCheckpoint, StoredCheckpoint] = (before, after),
            olds: _Entries = olds,
        ) -> Iterator[tuple[str, Change]]:
            return _compared(*sides, [(olds[path], new) for path, new in some.items()])

        found = _or_words(compared, pairs)
        for path, change in found.items():
            if change in (DAMAGED, UNREAD):  # which of the two is it?
                _norms(before, {path: olds[path]}, problems)
                _norms(after, {path: news[path]}, problems)
        yield changes | found


def _norms(
    checkpoint: StoredCheckpoint, entries: _Entries, problems: Problems
) -> dict[str, ScaledSum | str]:
    """The sum of the squares of each leaf, or a word; a leaf that cannot be read is a problem."""

    def squared(some: _Entries) -> Iterator[tuple[str, ScaledSum]]:
        sums = {path: ScaledSum() for path in some}
        for part in read_elements(checkpoint, some.values()):
            _add_squares(sums[part.entry.path], _real(part.values))
        yield from sums.items()

    def note(error: CorruptionError | UnreachableError) -> None:
        problems.setdefault(checkpoint.step, (_word(error), str(error)))

    return _or_words(squared, entries, note)


def _or_words(
    compute: Callable[[_Entries], Iterator[tuple[str, _Value]]],
    entries: _Entries,
    note: Callable[[CorruptionError | UnreachableError], None] = lambda _: None,
) -> dict[str, _Value | str]:
    """What `compute` finds of each leaf; a word for one that it cannot read.

    All leaves are read in one stream. If it fails, the rest is read one by one to find the leaf: the
    stream reads ahead, so its error names no place in it.
    """
    found: dict[str, _Value | str] = {}
    try:
        found.update(compute(entries))
        return found
    except (CorruptionError, UnreachableError, StepNotFoundError):
        pass
    word: str = ""
    for path, entry in entries.items():
        if path in found:
            continue
        if word not in (UNREAD, GONE):  # a storage that does not answer is not asked for every leaf
            try:
                found.update(compute({path: entry}))
                continue
            except StepNotFoundError:  # deleted meanwhile
                word = GONE
            except (CorruptionError, UnreachableError) as error:
                word = _word(error)
                note(error)
        found[path] = word
    return found


def _copy_same(
    known: dict[str, ScaledSum], other: dict[str, ScaledSum], changes: Mapping[str, Change | str]
) -> None:
    """Take the norms of leaves that did not change from the checkpoint beside."""
    for path, change in changes.items():
        if change == SAME and path in known:
            other.setdefault(path, known[path])


def _word(error: CorruptionError | UnreachableError) -> str:
    return DAMAGED if isinstance(error, CorruptionError) else UNREAD


def _compared(
    before: StoredCheckpoint,
    after: StoredCheckpoint,
    pairs: Sequence[tuple[LeafEntry, LeafEntry]],
) -> Iterator[tuple[str, Change]]:
    """The change of each pair: all chunks of `before` are read, and those of `after` that differ."""
    differing = {}
    for old, new in pairs:
        hashes = enumerate(zip(old.hashes(), new.hashes(), strict=True))
        differing[new.path] = [number for number, (one, other) in hashes if one != other]
    olds: Any = read_elements(before, [old for old, _ in pairs])
    news: Any = read_elements(after, [new for _, new in pairs], differing)
    with closing(olds), closing(news):
        for entry, _ in pairs:
            change = Change(ScaledSum(), ScaledSum(), ScaledSum())
            for number in range(len(entry.chunks)):
                old = new = _real(next(olds).values)
                _add_squares(change.before, old)
                if number in differing[entry.path]:
                    new = _real(next(news).values)
                    _add_distance(change.distance, old, new)
                _add_squares(change.after, new)
            yield entry.path, change


def _real(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements as float64; a complex number is two of them."""
    return as_float64(values.view(parts_dtype(values.dtype)))


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
            if np.isinf(distance).any():  # the distance of two finite numbers may overflow
                distance, halvings = after / 2 - before / 2, 1
            squares = ScaledSum()
            squares.add(distance, distance)
            total.merge(squares.value, squares.exponent + 2 * halvings)
