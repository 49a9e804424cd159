"""Deleting checkpoints, and packs that are no longer needed: first a plan, then its execution.

Invariant: at any instant every checkpoint that stays is readable. A manifest is deleted before its
packs; a pack only if no manifest that stays, and none in quarantine, reads from it; a pack that is
mostly dead only when its live chunks are durable elsewhere and every manifest names them there.
While a manifest is unreadable no pack is deleted. Nothing else is ever deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from perdure.errors import PruneError, StoreError
from perdure.store.compact import LiveChunks, compact, live_chunks, relocated_size
from perdure.store.failures import DamagedChunk
from perdure.store.format import PACKS, manifest_name, pack_step
from perdure.store.manifest import Manifest
from perdure.store.run_events import Removed
from perdure.store.run_log import RunLog
from perdure.store.storage import LostLock, Storage
from perdure.store.view import View

DEAD_SHARE = 0.5
"""A pack is compacted when that would free more than this share of its bytes."""

SPARE_BYTES = 1024 * 1024
"""A compaction leaves this much free space, for the manifests that it replaces and for others."""


@dataclass(frozen=True)
class PruneRequest:
    """What to delete: the input of a plan.

    Packs that no manifest mentions are deleted up to the save of step `orphans_to`; later ones may
    belong to a save in progress. Packs that are mostly dead are compacted if that frees
    `compact_from` bytes: all such packs with `everywhere`, else only packs of checkpoints that are
    deleted.
    """

    steps: frozenset[int] = frozenset()
    orphans_to: int = -1
    compact_from: int | None = None
    everywhere: bool = False
    quarantined: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CollectPlan:
    """What will be done, in the order of the attributes.

    `packs` are read by no manifest that stays, `orphans` were never named. `compact` are packs
    whose live chunks move into one new pack, from which the manifests of `rewrite` then read.
    `held_back` says why packs stay that seem not to be needed; `is_frozen` that nothing is deleted.
    """

    request: PruneRequest
    steps: tuple[int, ...] = ()
    packs: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    compact: tuple[str, ...] = ()
    rewrite: tuple[int, ...] = ()
    freed: int = 0
    copied: int = 0
    held_back: str | None = None
    quarantined: tuple[str, ...] = ()
    is_frozen: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.steps or self.packs or self.orphans or self.compact or self.quarantined)


@dataclass(frozen=True)
class Collected:
    """What an execution did beside deleting.

    `left` are packs that were not compacted, with the reason.
    """

    replaced: Mapping[int, Manifest]
    left: Mapping[str, str]
    damaged: tuple[DamagedChunk, ...] = ()


def plan_collect(view: View, request: PruneRequest) -> CollectPlan:
    """Decide what a request deletes, from a snapshot; raises `StoreError` if it names a pinned step."""
    present = view.readable.keys() | view.unreadable.keys()
    gone = request.steps & present
    if refused := sorted(gone & view.pinned):
        raise StoreError(
            f"steps {', '.join(map(str, refused))} are pinned and were not deleted; nothing was "
            f"changed. Unpin them first."
        )
    if view.frozen:
        why = f"nothing is deleted: {view.frozen}"
        return CollectPlan(request, held_back=why, is_frozen=True)
    steps = tuple(sorted(gone))
    set_aside = tuple(sorted(request.quarantined & view.quarantined.keys()))
    if view.unknown:
        why = f"a manifest cannot be read now and may need any pack: {view.unknown[0]}"
        return CollectPlan(request, steps, held_back=why)
    if broken := sorted(view.broken.keys() - gone):
        what = "manifest" if broken[0] in view.unreadable else "checkpoint"
        why = (
            f"the {what} of step {broken[0]} cannot be read and may need any pack: "
            f"{view.broken[broken[0]]} `perdure verify --repair` moves it aside"
        )
        return CollectPlan(request, steps, held_back=why, quarantined=set_aside)
    kept = {step: view.summaries[step].packs for step in sorted(view.summaries.keys() - gone)}
    in_quarantine = _named(man for name, man in view.quarantined.items() if name not in set_aside)
    needed = in_quarantine.union(*kept.values())
    touched = {pack for step in gone & view.summaries.keys() for pack in view.summaries[step].packs}
    touched |= _named(view.quarantined[name] for name in set_aside)
    packs = sorted((touched - needed) & view.packs.keys())
    others = view.packs.keys() - touched - needed
    orphans = sorted(each for each in others if 0 <= pack_step(each) <= request.orphans_to)
    why = None
    if orphans and view.lost:
        orphans, why = [], f"{view.lost[0]} cannot be read and may need packs that nobody else does"
    candidates = (needed - in_quarantine) & view.packs.keys()
    if not request.everywhere:
        candidates &= touched
    live = _mostly_dead(view, kept, candidates, request)
    old = sum(view.packs[name] for name in (*packs, *orphans, *live))
    rewrite = [step for step, names in kept.items() if not live.keys().isdisjoint(names)]
    copied = relocated_size(live)
    return CollectPlan(
        request=request,
        steps=steps,
        packs=tuple(packs),
        orphans=tuple(orphans),
        compact=tuple(sorted(live)),
        rewrite=tuple(rewrite) if live else (),
        freed=old - copied,
        copied=copied,
        held_back=why,
        quarantined=set_aside,
    )


def execute_collect(storage: Storage, log: RunLog, view: View, plan: CollectPlan) -> Collected:
    """Carry out a plan made from `view`, read under the lock just now.

    After a crash, plan again.
    """
    for step in plan.steps:
        storage.delete(manifest_name(step))
    for name in plan.quarantined:
        manifest = view.quarantined[name]
        with suppress(OSError):  # a full disk must not prevent the deletion that frees space
            log.append(Removed(step=manifest.step, fingerprint=manifest.fingerprint))
        storage.delete(name)
    for name in (*plan.packs, *plan.orphans):
        storage.delete(PACKS + name)
    if not plan.compact:
        return Collected({}, {})
    free = storage.free_bytes()
    if free is not None and plan.copied + SPARE_BYTES > free:
        # Compaction can wait. It must not be what fills a disk.
        why = (
            f"{plan.copied + SPARE_BYTES} bytes are needed to copy what is alive, {free} are free."
        )
        return Collected({}, dict.fromkeys(plan.compact, why))
    kept = {step: view.manifest(step) for step in plan.rewrite}
    replaced, left = compact(storage, kept, plan.compact)
    for name in plan.compact:
        if name not in left:
            storage.delete(PACKS + name)
    damaged = [error for error in left.values() if isinstance(error, DamagedChunk)]
    advice = {error.pack: " `perdure verify --repair` sets it aside." for error in damaged}
    why = {name: f"{error}{advice.get(name, '')}" for name, error in left.items()}
    return Collected(replaced, why, tuple(damaged))


def stopped(where: str, error: OSError) -> PruneError:
    """The error of an execution that failed in the middle."""
    advice = "Repair the cause, then run `perdure prune` or continue training."
    if isinstance(error, LostLock):
        advice = "Open the run directory again."
    return PruneError(
        f"{where}: deleting stopped in the middle: {error}. Every checkpoint that stays is readable. "
        f"{advice}"
    )


def _mostly_dead(
    view: View,
    kept: Mapping[int, Collection[str]],
    candidates: set[str],
    request: PruneRequest,
) -> dict[str, LiveChunks]:
    """The live chunks of each pack to compact. `kept` has the packs of each step that stays."""
    if (least := request.compact_from) is None:
        return {}
    # A pack that is too small is not looked into: a leaf that never changes keeps one for ever.
    candidates = {name for name in candidates if view.packs[name] >= least}
    if not candidates:
        return {}
    chosen = {}
    users = (
        view.manifest(step) for step, packs in kept.items() if not candidates.isdisjoint(packs)
    )
    for name, live in live_chunks(users, candidates).items():
        # Compared with a pack of its live chunks alone, so that a pack just compacted is never chosen.
        spared = view.packs[name] - relocated_size({name: live})
        if spared > DEAD_SHARE * view.packs[name] and spared >= least:
            chosen[name] = live
    return chosen


def _named(manifests: Iterable[Manifest]) -> set[str]:
    return {pack.name for manifest in manifests for pack in manifest.packs}
