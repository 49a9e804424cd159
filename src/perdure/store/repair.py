"""Making a damaged run directory sound again without losing a byte that can still be restored.

Invariant: nothing that was committed is deleted. What is bad moves to quarantine with the reason
beside it; only leftovers of crashes and packs that nobody names are removed. What cannot be read stays
where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.errors import PruneError, SaveError, UnreachableError
from perdure.store.format import MARKER, MAX_STEP, PACKS
from perdure.store.garbage_collection import PruneRequest
from perdure.store.run import Run
from perdure.store.verify import VerifyReport, examine


@dataclass(frozen=True)
class Repaired:
    """What a repair did, and the check after it: its `good` steps can be restored.

    `actions` are sentences in the order in which things were done; empty when all was well.
    """

    actions: tuple[str, ...]
    report: VerifyReport


def repair(run: Run) -> Repaired:
    """Become the writer, check everything, and set aside what is bad; may be repeated after a crash.

    Manifests that cannot be restored go to quarantine. From a damaged pack the chunks that good
    checkpoints need are copied to a new pack first; then it goes to quarantine too. Leftovers of
    crashes are removed, and packs that nobody names, these only when every manifest is readable.
    Raises `LockedError` while a writer is at work, `PruneError` when an operation fails.
    """
    actions = [] if run.is_run_directory else [f"wrote {MARKER} again: it was missing or damaged"]
    actions += [f"removed {name}: left by a writer that did not finish" for name in run.leftovers()]
    run.begin_writing()
    try:
        found = examine(run)
        for step, why in found.bad.items():
            actions.append(f"moved step {step} to {run.quarantine(step, why)}: {why}")
        actions += _salvage(run, found.damaged)
        plan = run.plan(PruneRequest(orphans_to=MAX_STEP))
        run.execute(plan)
        for name in plan.orphans:
            actions.append(f"removed {PACKS}{name}: no checkpoint needs it")
        for step in sorted(run.pinned() - set(run.steps())):
            run.unpin(step)
            actions.append(f"removed the pin of step {step}: it is not there")
    except (OSError, SaveError, UnreachableError) as error:
        raise PruneError(
            f"{run.where}: the repair stopped in the middle: {error}. Nothing that was good is lost. "
            f"Remove the cause, then run `perdure verify --repair` again."
        ) from error
    return Repaired(tuple(actions), examine(run).report)


def _salvage(run: Run, damaged: Mapping[str, str]) -> list[str]:
    """Move damaged packs to quarantine once no good checkpoint reads from them."""
    if not damaged:
        return []
    replaced, stay = run.evacuate(damaged)
    actions = [f"copied what step {step} needs out of damaged packs" for step in sorted(replaced)]
    for name, why in damaged.items():
        if name not in stay:
            actions.append(f"moved {PACKS}{name} to {run.quarantine_pack(name, why)}: {why}")
    return actions
