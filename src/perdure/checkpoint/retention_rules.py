"""`RetentionRules`: what a manager keeps, given to it or taken over from the last manager of the run.

Invariant: no checkpoint is deleted in silence that only the recorded rules keep. A manager without
rules of its own goes by the recorded ones; one that was given other rules warns.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import fields

from perdure.checkpoint.pruning import candidates
from perdure.checkpoint.recorded_retention import (
    RecordedRetention,
    read_retention,
    record_retention,
)
from perdure.checkpoint.retention import MonitoredRetention, Retention, decide
from perdure.store import Run
from perdure.store.format import RETENTION, steps_text


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
        self._is_recorded = False
        self._was_judged = False

    def begin(self, saved: int) -> list[str]:
        """Before the first prune, after the commit of `saved`: take over what is recorded or compare
        with it, and record what holds now. Returns notes for the user. Once."""
        if self._is_recorded:
            return []
        where, storage = self._run.where, self._run.storage
        try:
            before = read_retention(storage)
        except OSError as error:
            if self.retention is None:
                note = f"{where}: {RETENTION} cannot be read: {error}. Nothing is deleted until it can."
                return [note]
            before = None
        notes: list[str] = []
        if self.retention is None:
            self.retention = Retention() if before is None else before.retention
            if self.retention != Retention():
                logging.getLogger(__name__).info(
                    "%s: this manager was given no retention; it takes over that of the last one: %s",
                    where,
                    _text(self.retention),
                )
        elif before is not None and self.max_to_keep is not None:
            notes += self._deleted_by(self.retention, before.retention, saved)
        try:
            record_retention(storage, RecordedRetention(self.max_to_keep, self.retention))
        except OSError as error:
            notes.append(f"{where}: {RETENTION} was not written: {error}")
        self._is_recorded = True
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
