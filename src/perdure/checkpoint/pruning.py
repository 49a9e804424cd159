"""Retention applied to a run directory: which checkpoints go, what that frees."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.checkpoint.retention import Candidate, Retention, Verdict, decide
from perdure.store import Collected, CollectPlan, PruneRequest, Run
from perdure.store.contents import Contents
from perdure.store.format import MAX_STEP, seconds_of
from perdure.store.garbage_collection import plan_collect

COMPACT_FROM = 4 * 1024 * 1024
"""A prune after a save compacts only where that gives back this much; it stands behind the loop."""


@dataclass(frozen=True)
class PrunePlan:
    """A verdict for every checkpoint, and what the store does about it."""

    verdicts: tuple[Verdict, ...]
    store: CollectPlan


def candidates(held: Contents) -> list[Candidate]:
    """The checkpoints that retention decides on: those whose manifest can be read.

    One that cannot be read neither counts nor goes: it may be readable again once its disk is.
    """
    return [
        Candidate(
            step=step,
            created=seconds_of(manifest.created),
            metrics=manifest.metrics,
            pinned=step in held.pinned,
        )
        for step, manifest in sorted(held.manifests.items())
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
    """What a prune would do. Changes nothing.

    With `saved`, the step of the save just done, it leaves alone what a save in progress may be
    writing and moves only what is worth it; without, it takes everything that nobody needs. Neither
    that step nor the newest one goes, whatever the rules say. `in_use` is a step that is being copied
    to a mirror: it stays until the next prune. With `rolled_back`, what rollbacks set aside goes, too.
    """
    after_a_save = saved is not None
    held = run.contents(fresh=not after_a_save)
    newest = max(held.manifests, default=None)
    verdicts = tuple(
        Verdict(verdict.step, True, "just saved" if verdict.step == saved else "the newest")
        if not verdict.keep and verdict.step in (saved, newest)
        else verdict
        for verdict in decide(candidates(held), max_to_keep, retention)
    )
    gone = frozenset(
        verdict.step for verdict in verdicts if not verdict.keep and verdict.step != in_use
    )
    request = PruneRequest(
        steps=gone,
        orphans_to=saved if saved is not None else MAX_STEP,
        compact_from=COMPACT_FROM if after_a_save else 0,
        everywhere=not after_a_save,
        quarantined=frozenset(each.name for each in run.rolled_back())
        if rolled_back
        else frozenset(),
    )
    return PrunePlan(verdicts, plan_collect(held, request))


def execute_prune(run: Run, plan: PrunePlan) -> Collected:
    """Carry out a plan; see `Run.execute` for what holds meanwhile and what it raises."""
    return run.execute(plan.store)
