"""The metrics of a run over its steps, from `metrics.jsonl` and from its manifests."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from perdure.look.natural_order import natural_key
from perdure.store import LocalStorage, Manifest, Run

Series = list[tuple[int, float | None]]
"""(step, value) in the order of steps; None stands for NaN and the infinities."""


def metric_series(run: Run, manifests: Iterable[Manifest]) -> tuple[dict[str, Series], int]:
    """The metrics by name, and how many lines of `metrics.jsonl` cannot be read.

    Where both have a value of one step, that of `metrics.jsonl` is taken. A run in a bucket has no
    `metrics.jsonl`, and neither has one that no `Trainer` made: their metrics are those that the
    checkpoints were saved with.

    Args:
        run: The run.
        manifests: Its readable checkpoints.
    """
    values: dict[str, dict[int, float | None]] = {}
    for manifest in manifests:
        _add(values, manifest.step, manifest.metrics)
    rows, unread = _read_rows(Path(run.where)) if isinstance(run.storage, LocalStorage) else ([], 0)
    for step, metrics in rows:
        _add(values, step, metrics)
    return {name: sorted(values[name].items()) for name in sorted(values, key=natural_key)}, unread


def _read_rows(directory: Path) -> tuple[list[tuple[int, dict[str, float | None]]], int]:
    # Not before it is needed: the loop imports much.
    from perdure.train.summaries import METRICS, read

    path = directory / METRICS
    if not os.path.isfile(path):  # a pipe would be waited for
        return [], 0
    try:
        with path.open("rb") as file:
            lines = sum(1 for _ in file)
        rows = read(path)
    except OSError:
        return [], 0
    return [(row.step, row.metrics) for row in rows], lines - len(rows)


def _add(
    values: dict[str, dict[int, float | None]], step: int, metrics: dict[str, float | None]
) -> None:
    for name, value in metrics.items():
        finite = None if value is None or not math.isfinite(value) else float(value)
        values.setdefault(name, {})[step] = finite
