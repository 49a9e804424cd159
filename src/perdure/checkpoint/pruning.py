"""Applies retention to a run directory: plans which checkpoints to delete, and executes the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from perdure.checkpoint.retention import Candidate, Retention, Verdict, decide
from perdure.store import Collected, CollectPlan, PruneRequest, Run
from perdure.store.contents import ManifestSummary, OutdatedPlanError
from perdure.store.format import MAX_STEP, seconds_of
from perdure.store.garbage_collection import plan_collect
from perdure.store.manifest import Manifest

COMPACT_FROM = 4 * 1024 * 1024
"""Bytes that a compaction after a save has to free: the next save waits for it."""


@dataclass(frozen=True)
class PrunePlan:
    """A verdict for every checkpoint, and the plan of the store that follows from them; whether they
    were made from what the writer remembers."""

    verdicts: tuple[Verdict, ...]
    store: CollectPlan
    remembered: bool = False


def candidates(
    manifests: Mapping[int, Manifest | ManifestSummary], pinned: Collection[int]
) -> list[Candidate]:
    """The checkpoints that retention decides on: those whose manifest can be read.

    A checkpoint that cannot be read does not count and is not deleted: it may be readable again later.
    """
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

    Args:
        run: The run directory.
        max_to_keep: How many of the newest checkpoints stay; None keeps all.
        retention: Which others stay.
        saved: The step of the save just done, which stays too. The plan then leaves files alone that a
            save in progress may be writing, and compacts only if that frees much. None plans for all
            files that nobody needs.
        in_use: A step that is being copied to a mirror; it stays until the next prune.
        rolled_back: Delete the checkpoints that rollbacks set aside, too.

    Raises:
        PruneError: The run directory cannot be listed.
    """
    after_a_save = saved is not None
    held = run.contents(fresh=not after_a_save)
    newest = max(held.summaries, default=None)
    verdicts = tuple(
        Verdict(verdict.step, True, "just saved" if verdict.step == saved else "the newest")
        if not verdict.keep and verdict.step in (saved, newest)
        else verdict
        for verdict in decide(candidates(held.summaries, held.pinned), max_to_keep, retention)
    )
    deleted = frozenset(
        verdict.step for verdict in verdicts if not verdict.keep and verdict.step != in_use
    )
    request = PruneRequest(
        steps=deleted,
        orphans_to=saved if saved is not None else MAX_STEP,
        compact_from=COMPACT_FROM if after_a_save else 0,
        everywhere=not after_a_save,
        quarantined=frozenset(checkpoint.name for checkpoint in run.rolled_back())
        if rolled_back
        else frozenset(),
    )
    return PrunePlan(verdicts, plan_collect(held, request), remembered=after_a_save)


def execute_prune(run: Run, plan: PrunePlan) -> Collected:
    """Execute a plan; `Run.execute` documents its guarantees and its errors."""
    return run.execute(plan.store, remembered=plan.remembered)


def prune_after_save(
    run: Run, max_to_keep: int | None, retention: Retention, saved: int, in_use: int | None
) -> list[str]:
    """Plan a prune from what the writer remembers, and execute it; returns notes for the user.

    If the run directory is not as the writer remembers it, the plan is made again from what is there.
    The arguments are those of `plan_prune`.
    """
    try:
        plan = plan_prune(run, max_to_keep, retention, saved, in_use)
        left = {} if plan.store.empty else execute_prune(run, plan).left
    except OutdatedPlanError:
        plan = plan_prune(run, max_to_keep, retention, saved, in_use)
        left = {} if plan.store.empty else execute_prune(run, plan).left
    held_back = plan.store.held_back
    frozen = plan.store.is_frozen
    notes = [held_back if frozen else f"packs stay: {held_back}"] if held_back else []
    return notes + [f"{pack} was not compacted: {reason}" for pack, reason in left.items()]
