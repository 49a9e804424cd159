"""What a report says about runs, in plain values: checkpoints, recipe, metrics, life, changes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import PerdureError, PruneError, UnreachableError
from perdure.look.listing import listed
from perdure.look.tables import natural_key
from perdure.report.layer_changes import DAMAGED, UNREAD, Problems, changes_document
from perdure.report.life import find_life
from perdure.store import Run
from perdure.store.contents import Contents
from perdure.store.local import LocalStorage
from perdure.store.log import log_place, read_log
from perdure.store.manifest import Manifest
from perdure.store.storage import Storage
from perdure.store.urls import name_at_step

Series = list[tuple[int, float | None]]
"""(step, value) in the order of steps; None stands for NaN and the infinities."""

_MOST_LEAVES = 8
_MOST_REPLAYS = 100
_REPLAYS = "replays/"


class _Stretch(Struct):
    start: int | None
    stop: int
    verdict: str
    steps: int
    checkpoints: int
    step: int | None = None
    what: str = ""


class _Replay(Struct):
    created: str
    host: str
    command: list[str]
    verdict: str
    stretches: list[_Stretch]


_REPLAYED = msgspec.json.Decoder(_Replay)


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
    newest = manifests[max(manifests)] if manifests else None
    document = {
        "run": run.where,
        "recipe": dict(newest.recipe) if newest else {},
        "other_recipes": _other_recipes(manifests),
        "stored_nbytes": sum(contents.packs.values()),
        "checkpoints": _rows(run, contents, problems, verified),
        "quarantined": len(run.quarantined()),
        "metrics": series,
        "unread_metric_lines": unread_lines,
        "life": find_life(run, logs),
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
        rows[checkpoint.step] = asdict(checkpoint)
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


def compare_runs(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """What several runs have in common and what differs, from their manifests and metrics.

    Returns:
        `recipe`: by field that differs, the value of each run (None if it has none); `recipe_fields`:
        all fields that were compared; `metrics`: by metric that differs at a step that all have it of,
        the first such step and its `values`; `common_steps`: how many steps all runs have a readable
        checkpoint of; `first_different_step`: the first of them whose fingerprints differ, or None;
        `leaves`: up to 8 leaves that differ there, of `different_leaves` in all.
    """
    recipes = [run.document["recipe"] for run in runs]
    fields = sorted({name for recipe in recipes for name in recipe})
    metrics: dict[str, dict[str, Any]] = {}
    for name in set.intersection(*(set(run.document["metrics"]) for run in runs)):
        series = [dict(run.document["metrics"][name]) for run in runs]
        for step in sorted(set.intersection(*map(set, series))):
            values = [each[step] for each in series]
            if len(set(values)) > 1:
                metrics[name] = {"step": step, "values": values}
                break
    common = sorted(set.intersection(*(set(run.manifests) for run in runs)))
    first = next(
        (step for step in common if len({run.manifests[step].fingerprint for run in runs}) > 1),
        None,
    )
    leaves = [] if first is None else _different([run.manifests[first] for run in runs])
    return {
        "recipe": {
            name: [recipe.get(name) for recipe in recipes]
            for name in fields
            if len({repr(recipe.get(name)) for recipe in recipes}) > 1
        },
        "recipe_fields": fields,
        "metrics": {name: metrics[name] for name in sorted(metrics, key=natural_key)},
        "common_steps": len(common),
        "first_different_step": first,
        "different_leaves": len(leaves),
        "leaves": leaves[:_MOST_LEAVES],
    }


def _different(manifests: Sequence[Manifest]) -> list[str]:
    """The paths of the leaves that are not the same in all of them."""
    tables = [
        {leaf.path: (leaf.dtype, leaf.shape, leaf.hashes()) for leaf in manifest.leaves}
        for manifest in manifests
    ]
    paths = sorted({path for table in tables for path in table})
    return [
        path for path in paths if any(table.get(path) != tables[0].get(path) for table in tables)
    ]


def metric_series(run: Run, manifests: Iterable[Manifest]) -> tuple[dict[str, Series], int]:
    """The metrics of a run by name, and how many lines of `metrics.jsonl` cannot be read.

    Where both have a value of one step, that of `metrics.jsonl` is taken. A run in a bucket has no
    `metrics.jsonl`, and neither has one that no `Trainer` made: their metrics are those that the
    checkpoints were saved with.
    """
    rows: list[tuple[int, Mapping[str, float | None]]] = [(m.step, m.metrics) for m in manifests]
    unread = 0
    if isinstance(run.storage, LocalStorage):
        from perdure.train.summaries import METRICS, read  # the loop imports much

        path = Path(run.where) / METRICS
        try:
            if os.path.isfile(path):  # a pipe would be waited for
                with path.open("rb") as file:
                    lines = sum(1 for _ in file)
                logged = read(path)
                rows += [(row.step, row.metrics) for row in logged]
                unread = lines - len(logged)
        except OSError:
            pass
    values: dict[str, dict[int, float | None]] = {}
    for step, metrics in rows:
        for name, value in metrics.items():
            finite = None if value is None or not math.isfinite(value) else float(value)
            values.setdefault(name, {})[step] = finite
    return {name: sorted(values[name].items()) for name in sorted(values, key=natural_key)}, unread


def replay_rows(storage: Storage) -> list[dict[str, Any]]:
    """One row for each record of a replay, the newest last; one that was changed has no `verdict`."""
    rows = []
    names = {re.sub(r"(/\d+\.json|\.jsonl)$", "", name) for name in storage.list(_REPLAYS)}
    for name in sorted(names)[-_MOST_REPLAYS:]:
        row: dict[str, Any] = {"name": log_place(storage, name), "verdict": None}
        with suppress(OSError, PerdureError):
            for line in read_log(storage, name):
                row |= msgspec.to_builtins(line.decode(_REPLAYED, row["name"]))
        rows.append(row)
    return rows
