"""How much floating-point leaves, and the layers that they form, changed between checkpoints.

Equal chunk hashes are not read. A leaf that is damaged has a word in place of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import ArgumentError, CorruptionError, StepNotFoundError, UnreachableError
from perdure.look.leaf_reader import is_floating, read_elements, select_leaves
from perdure.look.numerics import as_float64, parts_dtype, product_sum, root_ratio
from perdure.look.tables import natural_key
from perdure.store.manifest import LeafEntry

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

    before: float
    after: float
    distance: float


def changes_document(
    checkpoints: Sequence[StoredCheckpoint], leaves: str | Iterable[str] | None, problems: Problems
) -> dict[str, Any]:
    """The relative change of each layer from one checkpoint to the next, in plain values.

    A layer is the leaves with the same first parts of their path, at most 40 layers; at most 25
    checkpoints are compared, spread evenly. `problems` gets those that cannot be read.
    ArgumentError if `leaves` selects nothing.
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
    checkpoints: Sequence[StoredCheckpoint], leaves: str | Iterable[str] | None, problems: Problems
) -> tuple[list[dict[str, float]], list[dict[str, Change | str]]]:
    """The squared norms of the leaves of each checkpoint, and the changes from each to the next.

    Values that several share are read once. A damaged leaf has no norm. As `changes_document`
    otherwise.
    """
    entries = _float_leaves(checkpoints, leaves)
    changes = list(_changes(checkpoints, entries, problems))
    known: dict[Any, float] = {}
    for (olds, news), found in zip(pairwise(entries), changes, strict=True):
        for path, change in found.items():
            if isinstance(change, Change):
                known[olds[path].bits] = change.before
                known[news[path].bits] = change.after
    for checkpoint, table in zip(checkpoints, entries, strict=True):
        missing = {path: entry for path, entry in table.items() if entry.bits not in known}
        for path, squares in _squares(checkpoint, missing, problems).items():
            if isinstance(squares, float):
                known[table[path].bits] = squares
    norms = [
        {path: known[key] for path, entry in table.items() if (key := entry.bits) in known}
        for table in entries
    ]
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


def change_ratio(changes: Sequence[Change | str]) -> float | str:
    """The relative change of several leaves together: the norm of the differences over that before.

    A word where there is no number: `damaged` if any is, `same`, `from zero`, `not finite`.
    """
    for word in UNREADABLE:
        if word in changes:
            return word
    numbers = [change for change in changes if isinstance(change, Change)]
    if not numbers:
        return NEW if NEW in changes else SAME
    distance = math.fsum(change.distance for change in numbers)
    before = math.fsum(change.before for change in numbers)
    if not (math.isfinite(distance) and math.isfinite(before)):
        return "not finite"
    ratio = root_ratio(distance, before) if before else None
    return "from zero" if ratio is None else ratio


def _head(path: str, depth: int) -> str:
    return "/".join(path.split("/")[:depth])


def _float_leaves(
    checkpoints: Sequence[StoredCheckpoint], leaves: str | Iterable[str] | None
) -> list[_Entries]:
    """The floating-point arrays of each checkpoint by path; ArgumentError if nothing is selected."""
    found: list[_Entries] = []
    errors: list[ArgumentError] = []
    for checkpoint in checkpoints:
        try:
            selected = select_leaves(checkpoint, leaves)
        except ArgumentError as error:
            selected = []
            errors.append(error)
        found.append({entry.path: entry for entry in selected if is_floating(entry)})
    if errors and len(errors) == len(checkpoints):
        raise errors[-1]
    return found


def _changes(
    checkpoints: Sequence[StoredCheckpoint], entries: Sequence[_Entries], problems: Problems
) -> Iterator[dict[str, Change | str]]:
    """How each leaf changed from each checkpoint to the next; a word where there are no numbers."""
    for sides, (olds, news) in zip(pairwise(checkpoints), pairwise(entries), strict=True):
        changes: dict[str, Change | str] = {}
        pairs: dict[str, tuple[LeafEntry, LeafEntry]] = {}
        for path, new in news.items():
            old = olds.get(path)
            if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
                changes[path] = NEW
            elif old.hashes() == new.hashes():
                changes[path] = SAME
            else:
                pairs[path] = old, new
        found = _or_words(partial(_compared, *sides), pairs)
        for path, change in found.items():
            if change in (DAMAGED, UNREAD):  # which of the two is it?
                for side, entry in zip(sides, pairs[path], strict=True):
                    _squares(side, {path: entry}, problems)
        yield changes | found


def _squares(
    checkpoint: StoredCheckpoint, entries: _Entries, problems: Problems
) -> dict[str, float | str]:
    """The sum of the squares of each leaf, or a word; a leaf that cannot be read is a problem."""

    def squared(some: _Entries) -> Iterator[tuple[str, float]]:
        sums = dict.fromkeys(some, 0.0)
        for part in read_elements(checkpoint, some.values()):
            values = _real(part.values)
            sums[part.entry.path] = product_sum(values, values, sums[part.entry.path])
        yield from sums.items()

    def note(error: CorruptionError | UnreachableError) -> None:
        problems.setdefault(checkpoint.step, (_word(error), str(error)))

    return _or_words(squared, entries, note)


def _or_words(
    compute: Callable[[dict[str, Any]], Iterator[tuple[str, _Value]]],
    entries: dict[str, Any],
    note: Callable[[CorruptionError | UnreachableError], None] = lambda _: None,
) -> dict[str, _Value | str]:
    """What `compute` finds of each leaf, in one stream; if that fails, leaf by leaf, with words."""
    found: dict[str, _Value | str] = {}
    try:
        found.update(compute(entries))
        return found
    except (CorruptionError, UnreachableError, StepNotFoundError):
        pass
    word = ""
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


def _word(error: CorruptionError | UnreachableError) -> str:
    return DAMAGED if isinstance(error, CorruptionError) else UNREAD


def _compared(
    before: StoredCheckpoint,
    after: StoredCheckpoint,
    pairs: Mapping[str, tuple[LeafEntry, LeafEntry]],
) -> Iterator[tuple[str, Change]]:
    """The change of each pair: all chunks of `before` are read, and those of `after` that differ."""
    differing = {
        path: [
            n
            for n, (a, b) in enumerate(zip(old.chunks, new.chunks, strict=True))
            if a.hash != b.hash
        ]
        for path, (old, new) in pairs.items()
    }
    olds: Any = read_elements(before, [old for old, _ in pairs.values()])
    news: Any = read_elements(after, [new for _, new in pairs.values()], differing)
    with closing(olds), closing(news):
        for path, (entry, _) in pairs.items():
            change = Change(0.0, 0.0, 0.0)
            for number in range(len(entry.chunks)):
                old = new = _real(next(olds).values)
                distance = change.distance
                if number in differing[path]:
                    new = _real(next(news).values)
                    with np.errstate(over="ignore", invalid="ignore"):
                        distance = product_sum(new - old, new - old, distance)
                before_sum = product_sum(old, old, change.before)
                change = Change(before_sum, product_sum(new, new, change.after), distance)
            yield path, change


def _real(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements as float64; a complex number is two of them."""
    return as_float64(values.view(parts_dtype(values.dtype)))
