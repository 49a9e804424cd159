"""Which checkpoints stay: rules, a verdict for each checkpoint, a plan of deletions, and its
execution.

Invariant: to decide again after a decision was executed, in part or in full, keeps the same
checkpoints. No checkpoint is deleted in silence that only the rules of the last manager keep (in
the log of the run).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Literal

import msgspec

from perdure.checkpoint.arguments import integer, require_choice, require_name, require_number
from perdure.errors import ArgumentError, CorruptionError, UnreachableError
from perdure.store import CollectPlan, PruneRequest, Run
from perdure.store.format import MAX_STEP, Metric, seconds_of, steps_text
from perdure.store.garbage_collection import plan_collect
from perdure.store.manifest import Manifest, ManifestSummary
from perdure.store.run_events import Rules
from perdure.store.run_log import LogView
from perdure.store.verify import Packs
from perdure.store.view import OutdatedPlanError, View
from perdure.text import quoted

HOUR = 3600.0

COMPACT_FROM = 4 * 1024 * 1024
"""Bytes that a compaction after a save has to free: the next save waits for it."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay besides the newest `max_to_keep` and the pinned ones.

    Attributes:
        keep_every_n_hours: Keep one checkpoint for every so many hours of training.
        keep_period: Keep every step that is a multiple of this.
        best_metric: Keep the checkpoints whose metric of this name is best. A metric that is
            missing, NaN or infinite is never best; of two equal ones the newer is better.
        best_mode: Whether the highest ("max") or the lowest ("min") value is best.
        best_to_keep: How many of the best stay.

    Raises:
        ArgumentError: A value cannot be used.
    """

    keep_every_n_hours: float | None = None
    keep_period: int | None = None
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    best_to_keep: int = 1

    def __post_init__(self) -> None:
        hours = self.keep_every_n_hours
        require_number("keep_every_n_hours", hours, lambda h: h > 0, "None or more than 0")
        integer("keep_period", self.keep_period, optional=True)
        if self.best_metric is not None:
            require_name("best_metric", self.best_metric)
        require_choice("best_mode", self.best_mode, ("max", "min"))
        integer("best_to_keep", self.best_to_keep)


class MonitoredRetention(Retention):
    """Rules of a callback that has its own words for a metric that is missing."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as the rules see it; `created` is in seconds since 1970."""

    step: int
    created: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
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
    integer("max_to_keep", max_to_keep, optional=True)
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
            reasons[candidate.step].append(f"best {name} ({float(candidate.metrics[name]):g})")
    return [
        Verdict(step, bool(texts), ", ".join(texts) or f"older than the newest {max_to_keep}")
        for step, texts in reasons.items()
    ]


def ranked(candidates: Iterable[Candidate], metric: str, mode: str) -> list[Candidate]:
    """The candidates that have the metric, the best first."""
    sign = 1.0 if mode == "max" else -1.0
    scored = [
        (sign * value, candidate.step, candidate)
        for candidate in candidates
        if (value := candidate.metrics.get(metric)) is not None
        and math.isfinite(value := float(value))
    ]
    return [candidate for _, _, candidate in sorted(scored, key=lambda row: row[:2], reverse=True)]


def spaced(ordered: Sequence[Candidate], seconds: float) -> list[Candidate]:
    """The first, then each that was made `seconds` or more after the one before it in the result.

    If the clock was set back, both are kept and the count starts again: a clock that jumps keeps
    more, never less, and a kept checkpoint stays so once the ones in between are deleted.
    """
    kept: list[Candidate] = []
    for candidate, following in zip_longest(ordered, ordered[1:]):
        before_a_jump = following is not None and following.created < candidate.created
        if not kept or before_a_jump or not 0 <= candidate.created - kept[-1].created < seconds:
            kept.append(candidate)
    return kept


@dataclass(frozen=True)
class PrunePlan:
    """A verdict for every checkpoint, the plan of the store that follows from them, and after a save
    the view from which the writer has made it."""

    verdicts: tuple[Verdict, ...]
    store: CollectPlan
    view: View | None = None


def candidates(
    manifests: Mapping[int, Manifest | ManifestSummary], pinned: Collection[int]
) -> list[Candidate]:
    """The checkpoints that retention decides on. One that cannot be read does not count and is not
    deleted: it may be readable again later."""
    return [
        Candidate(
            step=step,
            created=seconds_of(manifest.created),
            metrics=manifest.metrics,
            pinned=step in pinned,
        )
        for step, manifest in sorted(manifests.items())
    ]


def plan_prune(
    run: Run,
    max_to_keep: int | None,
    retention: Retention,
    saved: int | None = None,
    in_use: int | None = None,
    *,
    rolled_back: bool = False,
) -> PrunePlan:
    """Plan a prune. Changes nothing. The newest checkpoint stays whatever the rules say.

    `saved`, the step just saved, stays too; the plan then leaves files alone that a save may be
    writing, and compacts only if that frees much. Without it the plan is for all files that nobody
    needs, and reads the newest checkpoint first. Packs later than that stay: a manifest may be
    lost. `in_use` is being copied to a mirror. `rolled_back` deletes what rollbacks set aside, too.
    Raises `CorruptionError` if the newest one is damaged.
    """
    after_a_save = saved is not None
    view = run.contents(whole=not after_a_save)
    newest = max(view.summaries, default=None)
    verdicts = tuple(
        Verdict(verdict.step, True, "just saved" if verdict.step == saved else "the newest")
        if not verdict.keep and verdict.step in (saved, newest)
        else verdict
        for verdict in decide(candidates(view.summaries, view.pinned), max_to_keep, retention)
    )
    deleted = frozenset(
        verdict.step for verdict in verdicts if not verdict.keep and verdict.step != in_use
    )
    request = PruneRequest(
        steps=deleted,
        orphans_to=max(view.steps, default=MAX_STEP) if saved is None else saved,
        compact_from=COMPACT_FROM if after_a_save else 0,
        everywhere=not after_a_save,
        quarantined=frozenset(checkpoint.name for checkpoint in run.rolled_back())
        if rolled_back
        else frozenset(),
    )
    plan = plan_collect(view, request)
    if newest is not None and (plan.steps or plan.quarantined) and not after_a_save:
        try:
            Packs(run).require(view.manifest(newest))
        except CorruptionError as error:
            raise CorruptionError(
                f"{error} It is of the newest checkpoint, and the older ones were to be deleted. "
                f"Nothing was changed. `perdure verify {quoted(run.where)} --repair` sets it aside; "
                f"then prune again."
            ) from error
    return PrunePlan(verdicts, plan, view if after_a_save else None)


def prune_after_save(
    run: Run, max_to_keep: int | None, retention: Retention, saved: int, in_use: int | None
) -> list[str]:
    """Plan a prune and execute it; returns notes for the user."""
    try:
        plan = plan_prune(run, max_to_keep, retention, saved, in_use)
    except OutdatedPlanError:  # a manifest is not what it was at an earlier look
        plan = plan_prune(run, max_to_keep, retention, saved, in_use)
    left = {} if plan.store.empty else run.execute(plan.store, plan.view).left
    held_back = plan.store.held_back
    frozen = plan.store.is_frozen
    notes = [held_back if frozen else f"packs stay: {held_back}"] if held_back else []
    return notes + [f"{pack} was not compacted: {reason}" for pack, reason in left.items()]


@dataclass(frozen=True)
class RecordedRetention:
    """What the last writer of a run kept: `max_to_keep` (None for all) and its other rules."""

    max_to_keep: int | None = None
    retention: Retention = field(default_factory=Retention)


def record_retention(run: Run, rules: RecordedRetention) -> None:
    """Write the rules into the log, unless they are there already; durable on return."""
    run.begin_writing()
    if recorded_retention(run) != rules or not run.log.view.knows_rules:
        # As JSON has them, which tells no tuple from a list.
        run.log.append(Rules(max_to_keep=rules.max_to_keep, retention=asdict(rules.retention)))


def recorded_retention(run: Run) -> RecordedRetention | None:
    """The rules of the last writer; None if none are recorded, or none that this version knows."""
    if (rules := run.log.view.rules) is None:
        return None
    try:
        retention = msgspec.convert(rules.retention, Retention)
    except (msgspec.ValidationError, ArgumentError):
        return None
    return RecordedRetention(rules.max_to_keep, retention)


def lost_rules(view: LogView) -> str | None:
    """Why the rules of the last writer are not known; None if they are, or there were none."""
    if view.problem is not None:
        return view.problem
    if not view.knows_rules:
        return f"{view.where}: the rules of the last writer were lost in a repair."
    return None


class RetentionRules:
    """The rules of a writer, given to it or taken over from the last manager of the run.
    `retention` is None as long as they are not known, and nothing is deleted then."""

    def __init__(self, run: Run, max_to_keep: int | None, given: Retention | None) -> None:
        self.retention = given
        self._run, self._max_to_keep = run, max_to_keep
        self._before: RecordedRetention | None = None
        self._is_recorded = self._has_compared = self._was_judged = False

    def record(self) -> list[str]:
        """Take over the recorded rules, or record the given rules; returns notes for the user. A
        first checkpoint that is saved after this shows that the log had the rules."""
        if self._is_recorded:
            return []
        where = self._run.where
        self._run.begin_writing()
        before = recorded_retention(self._run)
        if self.retention is None:
            try:
                why = lost_rules(self._run.log.check())
            except UnreachableError:
                return []  # nothing is deleted until the next save, which asks again
            if why is not None:
                if self._max_to_keep is None:
                    return []  # nothing is deleted anyway
                advice = "until one is: ManagerOptions(retention=Retention(...))."
                return [f"{why} This manager was given no retention; nothing is deleted {advice}"]
            self.retention = Retention() if before is None else before.retention
            if self.retention != Retention():
                logging.getLogger(__name__).info(
                    "%s: this manager was given no retention; it takes over that of the last one: %s",
                    where,
                    _text(self.retention),
                )
        else:
            self._before = before
        try:
            record_retention(self._run, RecordedRetention(self._max_to_keep, self.retention))
        except (OSError, CorruptionError) as error:
            return [f"{where}: the retention could not be recorded: {error}"]
        self._is_recorded = True
        return []

    def check(self, saved: int, metrics: Collection[str]) -> list[str]:
        """After the commit of `saved`: notes on checkpoints that these rules delete and the last rules
        kept, and on a metric that the checkpoints lack. Each note once."""
        notes = self.record()
        if (rules := self.retention) is None:
            return notes
        if not self._has_compared:
            self._has_compared = True
            is_frozen = self._run.log.view.problem is not None
            if self._before is not None and self._max_to_keep is not None and not is_frozen:
                notes += self._deleted_by(rules, self._before.retention, saved)
        wanted = None if isinstance(rules, MonitoredRetention) else rules.best_metric
        if wanted is None or self._was_judged:
            return notes
        # An evaluation comes later than the first save: there is no note about a name such as
        # `eval/loss` until another metric of `eval/` is there.
        group = wanted.rpartition("/")[0]
        self._was_judged = any(name.rpartition("/")[0] == group for name in metrics)
        if self._was_judged and wanted not in metrics:
            notes.append(
                f"{self._run.where}: the retention keeps the best by {wanted!r}, and step {saved} was "
                f"saved without a metric of that name; found {', '.join(map(repr, sorted(metrics)))}. "
                f"A checkpoint without it is never the best: check Retention(best_metric=...)."
            )
        return notes

    def apply(self, saved: int, in_use: int | None) -> list[str]:
        """Delete what the rules do not keep, if they are known; returns notes for the user."""
        if self._max_to_keep is None or self.retention is None:
            return []
        notes = prune_after_save(self._run, self._max_to_keep, self.retention, saved, in_use)
        return [f"{self._run.where}: {note}" for note in notes]

    def _deleted_by(self, mine: Retention, before: Retention, saved: int) -> list[str]:
        view = self._run.contents(whole=False)
        rows = candidates(view.summaries, view.pinned)
        kept = {verdict.step for verdict in decide(rows, self._max_to_keep, mine) if verdict.keep}
        kept |= {saved, max(view.summaries, default=saved)}
        lost = {
            verdict.step: verdict.reason
            for verdict in decide(rows, self._max_to_keep, before)
            if verdict.keep and verdict.step not in kept
        }
        if not lost:
            return []
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in list(lost.items())[:5])
        note = (
            f"{self._run.where}: deletes steps {steps_text(sorted(lost))}, which the last manager kept "
            f"and the retention of this one does not ({reasons}). What keeps such checkpoints: "
            f"ManagerOptions(retention={_text(before)}), or no retention at all; `pin` keeps one."
        )
        return [note]


def _text(rules: Retention) -> str:
    given = [
        f"{row.name}={value!r}"
        for row in fields(Retention)
        if (value := getattr(rules, row.name)) != row.default
    ]
    return f"Retention({', '.join(given)})"
