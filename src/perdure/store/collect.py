"""Deleting checkpoints: a plan first, then its execution in an order that is safe at any instant.

Invariant: a manifest goes before its packs, and a pack goes only when no manifest that stays, and
no quarantined one, reads from it. Nothing else is ever deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from perdure.store.format import PACKS, Manifest, manifest_name
from perdure.store.storage import Storage


@dataclass(frozen=True)
class DeletePlan:
    """Steps whose manifests go, and the packs that nobody needs afterwards."""

    steps: tuple[int, ...]
    packs: tuple[str, ...]


def plan_delete(
    manifests: Mapping[int, Manifest], steps: Iterable[int], packs: Collection[str]
) -> DeletePlan:
    """What deleting `steps` means, given every readable manifest and the packs present.

    A pack that no manifest mentions at all is left alone: it may belong to a save in progress.
    """
    gone = sorted(set(steps))
    kept = {pack.name for step, man in manifests.items() if step not in gone for pack in man.packs}
    freed = {pack.name for step in gone if step in manifests for pack in manifests[step].packs}
    return DeletePlan(tuple(gone), tuple(sorted((freed - kept) & set(packs))))


def execute_delete(storage: Storage, plan: DeletePlan) -> None:
    """Carry out a plan. May be repeated after a crash at any point."""
    for step in plan.steps:
        storage.delete(manifest_name(step))
    for pack in plan.packs:
        storage.delete(PACKS + pack)
