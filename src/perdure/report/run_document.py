"""What a report says about runs, in plain values: checkpoints, recipe, metrics, life, changes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import PerdureError, PruneError, UnreachableError
from perdure.look.certificate import Replay, States, replay_names, states_seen
from perdure.look.listing import listed
from perdure.look.tables import natural_key
from perdure.report.layer_changes import DAMAGED, UNREAD, Problems, changes_document
from perdure.store import Run
from perdure.store.format import Metric
from perdure.store.local import LocalStorage
from perdure.store.log import log_place, read_log
from perdure.store.manifest import Manifest
from perdure.store.urls import name_at_step
from perdure.store.view import View
from perdure.supervise.attempts_log import DEFAULT_LOGS, RunHistory, read_runs, runs_at

Series = list[tuple[int, float | None]]
"""(step, value) in the order of steps; None stands for NaN and the infinities."""

_MOST_LEAVES = 8
_MOST_REPLAYS = 100


_RECORD = msgspec.json.Decoder(dict[str, Any])
_REPLAY = msgspec.json.Decoder(Replay)


def read_run(
    run: Run,
    *,
    logs: Sequence[Path] = (),
    leaves: str | Iterable[str] | None = None,
    verified: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Mapping[int, Manifest]]:
    """What a report says about a run, and its readable manifests by step. Damage raises nothing.

    `logs` of `perdure run` are looked for by default, `verified` is the document of `perdure verify
    --json`. Raises UnreachableError, ArgumentError (`leaves` selects nothing), NotARunError (of
    `logs`).
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
    return {
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
        "replays": replay_rows(run),
        "verify": None if verified is None else dict(verified),
    }, manifests


def contents_and_problems(run: Run) -> tuple[View, Problems]:
    """What the run holds, and which checkpoints are damaged as far as names and sizes tell."""
    try:
        contents = run.contents()
        problems = _problems(contents)
        if problems:  # a prune may have deleted a checkpoint and its packs meanwhile: look again
            contents = run.contents()
            again = _problems(contents)
            problems = {step: why for step, why in again.items() if problems.get(step) == why}
    except PruneError as error:
        raise UnreachableError(f"{run.where}: cannot be listed: {error.__cause__}.") from error
    return contents, problems


def _problems(contents: View) -> Problems:
    """By step, `damaged` or `unread` with the reason."""
    return {
        step: (UNREAD if why in contents.unknown else DAMAGED, why)
        for step, why in contents.broken.items()
    }


def _rows(
    run: Run, contents: View, problems: Problems, verified: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """One row for each checkpoint, oldest first: as in `perdure ls --json`, and its state."""
    rows: dict[int, dict[str, Any]] = {step: {"step": step} for step in contents.unreadable}
    for checkpoint in listed(run, contents.manifests):
        rows[checkpoint.step] = asdict(checkpoint)
        del rows[checkpoint.step]["age_s"]  # two reports of one run are equal
    names = ("unread", "bad", "good") if verified is not None else ()
    said = {step: name for name in names for step in (verified or {})[name]}
    for step, row in rows.items():
        state, why = problems.get(step, (None, None))
        row |= {"state": state, "why": why, "verified": said.get(step)}
    return [rows[step] for step in sorted(rows)]


def _other_recipes(manifests: Mapping[int, Manifest]) -> list[dict[str, Any]]:
    """Each change of the recipe from a checkpoint to the next: the step, the fields that changed."""
    changes: list[dict[str, Any]] = []
    for (_, before), (step, manifest) in pairwise(sorted(manifests.items())):
        if fields := _different([before.recipe, manifest.recipe]):
            changes.append({"step": step, "fields": fields})
    return changes


def _different(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By name the values that differ; None if a table lacks it."""
    names = sorted({name for table in tables for name in table})
    rows = {name: [table.get(name) for table in tables] for name in names}
    return {name: values for name, values in rows.items() if len(set(map(repr, values))) > 1}


def compare_runs(
    documents: Sequence[Mapping[str, Any]], manifests: Sequence[Mapping[int, Manifest]]
) -> dict[str, Any]:
    """What several runs have in common and what differs, from their manifests and metrics: fields
    of the recipes, metrics at their first different step, and the leaves that differ at the
    first common step with another fingerprint.
    """
    recipes = [document["recipe"] for document in documents]
    metrics: dict[str, dict[str, Any]] = {}
    named = set.intersection(*(set(document["metrics"]) for document in documents))
    for name in sorted(named, key=natural_key):
        series = [dict(document["metrics"][name]) for document in documents]
        for step in sorted(set.intersection(*map(set, series))):
            values = [each[step] for each in series]
            if len(set(values)) > 1:
                metrics[name] = {"step": step, "values": values}
                break
    common = sorted(set.intersection(*map(set, manifests)))
    parted = (step for step in common if len({run[step].fingerprint for run in manifests}) > 1)
    first = next(parted, None)
    states = [] if first is None else [run[first] for run in manifests]
    tables = [{leaf.path: leaf.bits for leaf in each.leaves} for each in states]
    leaves = list(_different(tables))
    return {
        "recipe": _different(recipes),
        "recipe_fields": sorted({name for recipe in recipes for name in recipe}),
        "metrics": metrics,
        "common_steps": len(common),
        "first_different_step": first,
        "different_leaves": len(leaves),
        "leaves": leaves[:_MOST_LEAVES],
    }


def metric_series(run: Run, manifests: Iterable[Manifest]) -> tuple[dict[str, Series], int]:
    """The metrics of a run by name, and how many lines of `metrics.jsonl` cannot be read.

    Without that file (a bucket, no `Trainer`) they are those that checkpoints were saved with.
    """
    rows: list[tuple[int, Mapping[str, Metric]]] = [(m.step, m.metrics) for m in manifests]
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
            number = float(value)
            values.setdefault(name, {})[step] = number if math.isfinite(number) else None
    return {name: sorted(values[name].items()) for name in sorted(values, key=natural_key)}, unread


def replay_rows(run: Run) -> list[dict[str, Any]]:
    """One row for each record of a replay, the newest last; one that was changed has no `verdict`, and
    `set_aside` says whether the run has other states at steps of the replay now."""
    rows, storage, replays = [], run.storage, dict[int, Replay]()
    for number, name in enumerate(replay_names(storage)[-_MOST_REPLAYS:]):
        row: dict[str, Any] = {"name": log_place(storage, name), "verdict": None}
        with suppress(OSError, PerdureError):
            for line in read_log(storage, name):
                replays[number] = line.decode(_REPLAY, row["name"])
                row |= line.decode(_RECORD, row["name"])
        rows.append(row)
    states: States = {}
    with suppress(OSError, PerdureError):
        states = states_seen(run, [part for each in replays.values() for part in each.stretches])
    for number, row in enumerate(rows):
        parts = [part for part in replays[number].stretches if part.seen] if row["verdict"] else []
        ends = [part.in_history(states, part.stop, trusted=True) for part in parts]
        row["set_aside"] = [end and end.stop for end in ends] != [
            part.seen[-1][0] for part in parts
        ]
    return rows


def find_life(run: Run, logs: Sequence[Path]) -> dict[str, Any] | None:
    """The life of a run in plain values: the totals, and each start with its attempts; None if
    unknown.

    It is that of the program that saved in this run directory, or in one of the same name; of a run
    without a checkpoint the newest in `logs`. By default `perdure-logs` is looked for in the run
    directory, the two above it, and the working directory. Raises NotARunError, UnreachableError
    (of `logs`).
    """
    least = 0 if logs and not run.steps() else 1
    best: tuple[int, str] = least, ""
    life: dict[str, Any] | None = None
    for path, starts in [runs_at(path) for path in logs] or _near(run):
        for program in dict.fromkeys(str(start.program) for start in starts):
            mine = [start for start in starts if str(start.program) == program]
            rank = max(_match(start, run.where) for start in mine), mine[-1].last_time
            if rank >= best:
                unreadable = sum(each.unreadable for each in starts)
                best, life = rank, _life_document(path, mine, unreadable)
    return life


def _match(start: RunHistory, where: str) -> int:
    """2 if a start saved in this run directory, 1 if it did in one of the same name."""
    saved = {os.path.realpath(path) if "://" not in path else path for path in start.saved}
    if (where if "://" in where else os.path.realpath(where)) in saved:
        return 2
    return int(os.path.basename(where) in map(os.path.basename, saved))


def _near(run: Run) -> list[tuple[Path, list[RunHistory]]]:
    """The runs in `perdure-logs` around the run directory and in the working directory."""
    parents: list[Path] = []
    with suppress(OSError):  # the working directory was removed
        parents = [Path.cwd()]
    if isinstance(run.storage, LocalStorage):
        where = Path(run.where)
        parents = [where, where.parent, where.parent.parent, *parents]
    found = []
    for logs in dict.fromkeys(parent / DEFAULT_LOGS for parent in parents):
        with suppress(OSError):
            found.append((logs, read_runs(logs)))
    return found


def _life_document(logs: Path, starts: Sequence[RunHistory], unreadable: int) -> dict[str, Any]:
    # One history of all starts, so that steps repeated from one to the next count, too.
    seconds = sum(start.seconds for start in starts)
    attempts = [attempt for start in starts for attempt in start.attempts]
    total = RunHistory(start=starts[-1].start, attempts=attempts, end={"seconds": seconds})
    totals, rows = total.document(), [start.history() for start in starts]
    for attempt, repeated in zip(
        (attempt for row in rows for attempt in row["attempts"]), total.repeated, strict=True
    ):
        attempt["repeated"] = repeated
    names = ("command", "repeated_steps", "seconds", "lost_seconds", "goodput")
    return {
        "record": str(logs),
        "unreadable_lines": unreadable,
        "attempts": len(attempts),
        **{name: totals[name] for name in names},
        "starts": rows,
    }
