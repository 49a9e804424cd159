"""Repairing a damaged run directory without losing a byte that can still be restored.

Invariant: nothing that was committed is deleted. What is damaged moves to quarantine with the reason,
and returns once it is whole; only leftovers of crashes and packs that no manifest names are removed.
What cannot be read stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from perdure.errors import PruneError, SaveError, UnreachableError
from perdure.store.format import MARKER, MAX_STEP, PACKS, manifest_name
from perdure.store.garbage_collection import PruneRequest
from perdure.store.log import log_place
from perdure.store.names import leftovers
from perdure.store.rollback import forget_lines, moving
from perdure.store.run import Run
from perdure.store.run_log import LOG, REPAIR_ADVICE, line_references
from perdure.store.verify import VerifyReport, examine, fits
from perdure.text import counted


@dataclass(frozen=True)
class Repaired:
    """What a repair did, one text for each action, and the check after it."""

    actions: tuple[str, ...]
    report: VerifyReport


def repair(run: Run) -> Repaired:
    """Become the writer, check everything, and set aside what is damaged; it can be repeated.

    A damaged pack moves to quarantine once the chunks that good checkpoints need are in a new one.
    The good lines of a damaged log are kept. Packs that no manifest names go if every manifest is
    readable; one later than the newest checkpoint stays, because its manifest may be lost.

    Raises LockedError, PruneError (an operation failed, or no pack is there), SaveError (not
    writable, or its manifests are gone), UnreachableError (not listable).
    """
    actions = [] if run.is_run_directory else [f"wrote {MARKER} again: it was missing or damaged"]
    try:
        found = leftovers(run.storage)
    except OSError as error:
        raise UnreachableError(f"{run.where}: {error}. Nothing was changed.") from error
    actions += [f"removed {name}: left by a writer that did not finish" for name in found]
    run.begin_writing()
    try:
        if (why := run.contents().foreign) is not None:
            raise PruneError(
                f"{why} If {MARKER} is the wrong one, remove it: the repair writes it again. Nothing "
                f"was moved."
            )
        actions += _repair_log(run)  # first: every other repair writes a line
        _, bad, damaged, whole = examine(run)
        if bad and not run.contents().packs:
            raise PruneError(
                f"{run.where}: no pack is in {PACKS}, which may be moved or not mounted, and "
                f"{counted(len(bad), 'checkpoint')} cannot be restored without. None of them "
                f"was moved. Bring it back, then repair again."
            )
        for step, reason in bad.items():
            actions.append(f"moved step {step} to {run.quarantine(step, reason)}: {reason}")
        actions += _return(run, whole)
        actions += _salvage(run, damaged)
        newest = run.newest_step()
        plan = run.plan(PruneRequest(orphans_to=MAX_STEP if newest is None else newest))
        run.execute(plan)
        for name in plan.orphans:
            actions.append(f"removed {PACKS}{name}: no checkpoint needs it")
    except (OSError, SaveError, UnreachableError) as error:
        raise PruneError(
            f"{run.where}: the repair stopped in the middle: {error}. Nothing that was good is lost. "
            f"Remove the cause, then run `perdure verify --repair` again."
        ) from error
    return Repaired(tuple(actions), examine(run)[0])


def _repair_log(run: Run) -> list[str]:
    """Keep the good lines of a damaged log, and set the file aside; checkpoints forget what is gone."""
    manifests = run.contents().manifests
    references = line_references(manifests.values())
    if (problem := run.log.view.problem_with(references)) is None:
        return []
    why = problem.removesuffix(REPAIR_ADVICE)
    aside = run.log.rebuild(why)
    for step in run.log.view.lost(references):
        run.committer.commit_manifest(
            msgspec.structs.replace(manifests[step], log=None), {}, replace=True
        )
    forget_lines(run.storage, run.log.view)
    place = log_place(run.storage, LOG)
    if aside is None:
        return [f"accepted that lines of {place} are lost: {why}"]
    return [f"moved {place} to {aside}, for you to look at, and kept its good lines: {why}"]


def _return(run: Run, whole: Sequence[str]) -> list[str]:
    """Return the checkpoints in quarantine that are whole again and continue the run."""
    actions = []
    for name in whole:
        view = run.contents()
        if fits(view, name):
            step = view.quarantined[name].step
            with moving(run.directory, "the repair", dry_run=False):
                run.storage.move(name, manifest_name(step))
            actions.append(f"returned step {step} from {name}: it is whole again")
    return actions


def _salvage(run: Run, damaged: Mapping[str, str]) -> list[str]:
    """Move damaged packs to quarantine once no good checkpoint reads from them."""
    if not damaged:
        return []
    replaced, stay = run.damage.evacuate(damaged)
    actions = [f"copied what step {step} needs out of damaged packs" for step in sorted(replaced)]
    for name, reason in damaged.items():
        if name not in stay:
            actions.append(
                f"moved {PACKS}{name} to {run.damage.set_aside(PACKS + name, reason)}: {reason}"
            )
        else:
            actions.append(f"left {PACKS}{name}, which is damaged, where it is: {stay[name]}")
    return actions
