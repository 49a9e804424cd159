"""Decides which checkpoints stay: a pure function of their steps, times, metrics and pins.

Invariant: deciding again after a decision was executed, in part or in full, keeps the same checkpoints.
A rule drops a checkpoint that it kept before only for a newer or a better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from perdure.errors import StoreError

HOUR = 3600.0


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay besides the newest `max_to_keep` and the pinned ones.

    Attributes:
        keep_every_n_hours: Keep one checkpoint for every so many hours of training.
        keep_period: Keep every step that is a multiple of this.
        best_metric: Keep the checkpoints whose metric of this name is best. A metric that is missing,
            NaN or infinite is never best; of two equal ones the newer is better.
        best_mode: Whether the highest ("max") or the lowest ("min") value is best.
        best_to_keep: How many of the best stay.

    Raises:
        StoreError: A value cannot be used.
    """

    keep_every_n_hours: float | None = None
    keep_period: int | None = None
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    best_to_keep: int = 1

    def __post_init__(self) -> None:
        hours, period = self.keep_every_n_hours, self.keep_period
        if hours is not None and not hours > 0:
            raise StoreError(f"keep_every_n_hours: expected None or more than 0, found {hours}.")
        if period is not None and period < 1:
            raise StoreError(f"keep_period: expected None or at least 1, found {period}.")
        if self.best_mode not in ("max", "min"):
            raise StoreError(f"best_mode: expected 'max' or 'min', found {self.best_mode!r}.")
        if self.best_to_keep < 1:
            raise StoreError(f"best_to_keep: expected at least 1, found {self.best_to_keep}.")


class MonitoredRetention(Retention):
    """Rules of a callback that has its own words for a metric that is missing."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as the rules see it; `created` is in seconds since 1970."""

    step: int
    created: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    pinned: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint stays, and why."""

    step: int
    keep: bool
    reason: str


def decide(
    candidates: Iterable[Candidate], max_to_keep: int | None, retention: Retention
) -> list[Verdict]:
    """A verdict for each checkpoint, oldest first. `max_to_keep` None keeps all of them."""
    if max_to_keep is not None and max_to_keep < 1:
        raise StoreError(f"max_to_keep: expected None or at least 1, found {max_to_keep}.")
    ordered = sorted(candidates, key=lambda candidate: candidate.step)
    reasons: dict[int, list[str]] = {candidate.step: [] for candidate in ordered}
    newest = ordered if max_to_keep is None else ordered[-max_to_keep:]
    for candidate in newest:
        reasons[candidate.step].append(
            "all are kept" if max_to_keep is None else f"one of the newest {max_to_keep}"
        )
    for candidate in ordered:
        if candidate.pinned:
            reasons[candidate.step].append("pinned")
        if retention.keep_period and candidate.step % retention.keep_period == 0:
            reasons[candidate.step].append(f"a multiple of {retention.keep_period}")
    if retention.keep_every_n_hours is not None:
        for candidate in spaced(ordered, retention.keep_every_n_hours * HOUR):
            reasons[candidate.step].append(f"one for every {retention.keep_every_n_hours:g} h")
    if (name := retention.best_metric) is not None:
        for candidate in ranked(ordered, name, retention.best_mode)[: retention.best_to_keep]:
            reasons[candidate.step].append(f"best {name} ({candidate.metrics[name]:g})")
    return [
        Verdict(step, bool(texts), ", ".join(texts) or f"older than the newest {max_to_keep}")
        for step, texts in reasons.items()
    ]


def ranked(
    candidates: Iterable[Candidate], metric: str, mode: Literal["max", "min"]
) -> list[Candidate]:
    """The candidates that have the metric, the best first."""
    sign = 1.0 if mode == "max" else -1.0
    scored = [
        (sign * value, candidate.step, candidate)
        for candidate in candidates
        if (value := candidate.metrics.get(metric)) is not None
        # A candidate made by hand may hold NaN, which no comparison orders.
        and value == value
    ]
    return [candidate for _, _, candidate in sorted(scored, key=lambda row: row[:2], reverse=True)]


def spaced(ordered: Sequence[Candidate], seconds: float) -> list[Candidate]:
    """The first, then each that was made `seconds` or more after the one before it in the result.

    If the clock was set back, the time between two checkpoints is unknown: both are kept and the count
    starts again from the later one. So a clock that jumps keeps more, never less, and a checkpoint that
    is kept stays so once the ones in between are deleted.
    """
    kept: list[Candidate] = []
    for candidate, following in zip_longest(ordered, ordered[1:]):
        before_a_jump = following is not None and following.created < candidate.created
        if not kept or before_a_jump or not 0 <= candidate.created - kept[-1].created < seconds:
            kept.append(candidate)
    return kept
