"""`RetentionRules`: what a manager keeps, given to it or taken over from the last manager of the run.

Invariant: no checkpoint is deleted in silence that only the recorded rules keep. A manager without
rules of its own goes by the recorded ones, and deletes nothing while they cannot be read; one that was
given other rules warns.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields

import msgspec

from perdure.checkpoint.pruning import candidates
from perdure.checkpoint.retention import MonitoredRetention, Retention, decide
from perdure.errors import CorruptionError, StoreError, UnreachableError
from perdure.store import Run
from perdure.store.format import steps_text
from perdure.store.log_view import LogView
from perdure.store.run_events import Rules


@dataclass(frozen=True)
class RecordedRetention:
    """What the last writer of a run kept: `max_to_keep` (None for all) and its other rules."""

    max_to_keep: int | None = None
    retention: Retention = field(default_factory=Retention)


def record_retention(run: Run, rules: RecordedRetention) -> None:
    """Write the rules into the log, unless they are there already; durable on return.

    Raises:
        CorruptionError: The log is damaged.
        OSError: The storage failed.
    """
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
    except (msgspec.ValidationError, StoreError):
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
    """The rules of a writer.

    Args:
        run: The run directory.
        max_to_keep: How many of the newest checkpoints stay; None keeps all.
        given: Which others stay; None for the rules that are recorded.

    Attributes:
        max_to_keep: As given.
        retention: Which others stay; None as long as this is not known, and nothing is deleted then.
    """

    def __init__(self, run: Run, max_to_keep: int | None, given: Retention | None) -> None:
        self.max_to_keep = max_to_keep
        self.retention = given
        self._run = run
        self._before: RecordedRetention | None = None
        self._is_recorded = self._has_compared = False
        self._was_judged = False

    def record(self) -> list[str]:
        """Take over the recorded rules, or record those that were given; returns notes for the user.

        A first checkpoint that is saved after this shows that the log had the rules.
        """
        if self._is_recorded:
            return []
        where = self._run.where
        self._run.begin_writing()
        self._before = before = recorded_retention(self._run)
        if self.retention is None:
            try:
                why = lost_rules(self._run.log.check())
            except UnreachableError:
                return []  # nothing is deleted until the next save, which asks again
            if why is not None:
                if self.max_to_keep is None:
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
            before = self._before = None  # nothing to compare
        try:
            record_retention(self._run, RecordedRetention(self.max_to_keep, self.retention))
        except (OSError, CorruptionError) as error:
            return [f"{where}: the retention could not be recorded: {error}"]
        self._is_recorded = True
        return []

    def begin(self, saved: int) -> list[str]:
        """Before the first prune, after the commit of `saved`: what these rules delete and others kept.

        Returns notes for the user. Once.
        """
        notes = self.record()
        if self.retention is not None and not self._has_compared:
            self._has_compared = True
            is_frozen = self._run.log.view.problem is not None
            if self._before is not None and self.max_to_keep is not None and not is_frozen:
                notes += self._deleted_by(self.retention, self._before.retention, saved)
        return notes

    def judge(self, step: int, metrics: Collection[str]) -> list[str]:
        """A note if the first checkpoint with metrics lacks the one that the best are kept by.

        There is no note about a name such as `eval/loss` until another metric of `eval/` is there: an
        evaluation comes later than the first save.
        """
        rules = self.retention
        if self._was_judged or rules is None or isinstance(rules, MonitoredRetention):
            return []
        wanted = rules.best_metric
        if wanted is None:
            return []
        beside = [name for name in metrics if _group(name) == _group(wanted)]
        if not beside:
            return []
        self._was_judged = True
        if wanted in beside:
            return []
        note = (
            f"{self._run.where}: the retention keeps the best by {wanted!r}, and step {step} was saved "
            f"without a metric of that name; found {', '.join(map(repr, sorted(metrics)))}. A "
            f"checkpoint without it is never the best: check Retention(best_metric=...)."
        )
        return [note]

    def _deleted_by(self, mine: Retention, before: Retention, saved: int) -> list[str]:
        held = self._run.contents(fresh=False)
        rows = candidates(held.summaries, held.pinned)
        kept = {verdict.step for verdict in decide(rows, self.max_to_keep, mine) if verdict.keep}
        kept |= {saved, max(held.summaries, default=saved)}
        lost = {
            verdict.step: verdict.reason
            for verdict in decide(rows, self.max_to_keep, before)
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
    """The rules as a program writes them."""
    given = [
        f"{row.name}={value!r}"
        for row in fields(Retention)
        if (value := getattr(rules, row.name)) != row.default
    ]
    return f"Retention({', '.join(given)})"


def _group(name: str) -> str:
    return name.rpartition("/")[0]
