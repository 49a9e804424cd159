"""What a report says about one run, in plain values: checkpoints, recipe, metrics, life, changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import PruneError, UnreachableError
from perdure.look.listing import checkpoint_json, listed
from perdure.report.heat_map import changes_document
from perdure.report.leaf_changes import DAMAGED, UNREAD, Problems
from perdure.report.metric_series import metric_series
from perdure.report.replay_section import replay_rows
from perdure.report.run_life import find_life, life_document
from perdure.store import Manifest, Run
from perdure.store.contents import Contents
from perdure.store.format import seconds_of
from perdure.store.urls import name_at_step


@dataclass(frozen=True)
class ReportedRun:
    """One run of a report: its document, and what a comparison with others needs.

    Attributes:
        document: Plain values, as `--json` prints them.
        manifests: Its readable checkpoints by step.
    """

    document: dict[str, Any]
    manifests: Mapping[int, Manifest]


def read_run(
    run: Run,
    *,
    logs: Sequence[Path] = (),
    leaves: str | Iterable[str] | None = None,
    verified: Mapping[str, Any] | None = None,
) -> ReportedRun:
    """Read what a report says about a run. Damage is reported and raises nothing.

    Args:
        run: The run.
        logs: Log directories of `perdure run`; looked for by default.
        leaves: The leaves that the heat map compares; all by default.
        verified: The document of `perdure verify --json`; None if there is none.

    Raises:
        UnreachableError: The run directory cannot be listed.
        ArgumentError: `leaves` selects nothing.
        NotARunError: One of `logs` has no record.
    """
    contents, problems = contents_and_problems(run)
    manifests = contents.manifests
    whole = [
        StoredCheckpoint(run, manifest, name_at_step(run.where, step))
        for step, manifest in manifests.items()
        if step not in problems
    ]
    changes = changes_document(whole, leaves, problems)
    series, unread_lines = metric_series(run, manifests.values())
    saved = [float(seconds_of(manifest.created)) for manifest in manifests.values()]
    life = find_life(run, logs, saved)
    newest = manifests[max(manifests)] if manifests else None
    document = {
        "run": run.where,
        "recipe": dict(newest.recipe) if newest else {},
        "other_recipes": _other_recipes(manifests),
        "stored_bytes": sum(contents.packs.values()),
        "checkpoints": _rows(run, contents, problems, verified),
        "quarantined": len(run.quarantined()),
        "metrics": series,
        "unread_metric_lines": unread_lines,
        "life": None if life is None else life_document(life),
        "changes": changes,
        "replays": replay_rows(run.storage),
        "verify": None if verified is None else dict(verified),
    }
    return ReportedRun(document, manifests)


def contents_and_problems(run: Run) -> tuple[Contents, Problems]:
    """What the run holds, and which checkpoints are damaged as far as names and sizes tell.

    Raises `UnreachableError` if the run directory cannot be listed.
    """
    try:
        contents = run.contents()
        problems = _problems(contents)
        if problems:  # a prune may have deleted a checkpoint and its packs meanwhile: look again
            contents = run.contents()
            seen = problems
            problems = {
                step: why for step, why in _problems(contents).items() if seen.get(step) == why
            }
    except PruneError as error:
        raise UnreachableError(f"{run.where}: cannot be listed: {error.__cause__}.") from error
    return contents, problems


def _problems(contents: Contents) -> Problems:
    """By step, `damaged` or `unread` with the reason."""
    problems = {
        step: (UNREAD if why in contents.unknown else DAMAGED, why)
        for step, why in contents.unreadable.items()
    }
    for step, manifest in contents.manifests.items():
        for pack in manifest.packs:
            size = contents.packs.get(pack.name)
            if size is None:
                problems[step] = DAMAGED, f"it needs {pack.name}, which is missing."
            elif size != pack.size:
                problems[step] = (
                    DAMAGED,
                    f"it expects {pack.name} to have {pack.size} bytes, found {size}.",
                )
    return problems


def _rows(
    run: Run, contents: Contents, problems: Problems, verified: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """One row for each checkpoint, oldest first: as in `perdure ls --json`, and its state."""
    rows: dict[int, dict[str, Any]] = {step: {"step": step} for step in contents.unreadable}
    for checkpoint in listed(run, contents.manifests):
        rows[checkpoint.step] = checkpoint_json(checkpoint)
        del rows[checkpoint.step]["age_s"]  # two reports of one run are equal
    for step, row in rows.items():
        state, why = problems.get(step, (None, None))
        row |= {"state": state, "why": why, "verified": _verdict(step, verified)}
    return [rows[step] for step in sorted(rows)]


def _verdict(step: int, verified: Mapping[str, Any] | None) -> str | None:
    """What `perdure verify` said of a step; None if it did not see it."""
    for name in ("good", "bad", "unread"):
        if verified is not None and step in verified[name]:
            return name
    return None


def _other_recipes(manifests: Mapping[int, Manifest]) -> list[dict[str, Any]]:
    """Each change of the recipe from a checkpoint to the next: the step, the fields that changed."""
    changes: list[dict[str, Any]] = []
    before: Manifest | None = None
    for step, manifest in sorted(manifests.items()):
        if before is not None and before.recipe != manifest.recipe:
            fields = {
                name: [before.recipe.get(name), manifest.recipe.get(name)]
                for name in sorted({*before.recipe, *manifest.recipe})
                if before.recipe.get(name) != manifest.recipe.get(name)
            }
            changes.append({"step": step, "fields": fields})
        before = manifest
    return changes
