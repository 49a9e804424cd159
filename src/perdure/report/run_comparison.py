"""Several runs side by side: fields of the recipe that differ, and the first common step that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.report.run_document import ReportedRun
from perdure.store.manifest import Manifest

_MOST_LEAVES = 8


def compare_runs(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """What several runs have in common and what differs, from their manifests alone.

    Returns:
        `recipe`: by field that differs, the value of each run (None if it has none); `common_steps`:
        how many steps all runs have a readable checkpoint of; `first_different_step`: the first of them
        whose fingerprints differ, or None; `leaves`: up to 8 leaves that differ there, of
        `different_leaves` in all.
    """
    recipes = [run.document["recipe"] for run in runs]
    names = sorted({name for recipe in recipes for name in recipe})
    common = sorted(set.intersection(*(set(run.manifests) for run in runs)))
    first = next(
        (step for step in common if len({run.manifests[step].fingerprint for run in runs}) > 1),
        None,
    )
    leaves = [] if first is None else _different([run.manifests[first] for run in runs])
    return {
        "recipe": {
            name: [recipe.get(name) for recipe in recipes]
            for name in names
            if len({repr(recipe.get(name)) for recipe in recipes}) > 1
        },
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
