"""Part "walk" of the proof of the store: random walks, in which no committed checkpoint is lost."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from report import Row, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "checkpoint"))

from random_walk import walk_in_bucket, walk_in_memory, walk_on_disk

from object_stores import moto_server

DISK, MEMORY, S3, SUMMARIES = 800, 1000, 200, 200


def walk_rows(_: Path) -> Iterator[Row]:
    """2,200 walks, each of 24 acts of 17 kinds."""
    seen: Counter[str] = Counter()
    yield row("random walks on a disk", _walks(walk_on_disk, range(DISK), seen))
    yield row(
        "random walks in memory", _walks(walk_in_memory, range(10_000, 10_000 + MEMORY), seen)
    )
    # In walks as short as these every manifest is decoded, unless the limit is another one.
    with patch("perdure.store.view.READ_NEWEST", 1):
        seeds = range(30_000, 30_000 + SUMMARIES)
        yield row(
            "random walks in memory, most manifests as summaries",
            _walks(walk_in_memory, seeds, seen),
        )
    with moto_server() as server:
        seeds = range(20_000, 20_000 + S3)
        yield row(
            "random walks on S3", _walks(lambda seed: walk_in_bucket(server, seed), seeds, seen)
        )
    acts = ", ".join(f"{name} {count}" for name, count in sorted(seen.items()))
    yield row(f"kinds of acts that happened: {acts}", (count > 0 for count in seen.values()))


def _walks(
    walk_once: Callable[[int], Counter[str]], seeds: range, seen: Counter[str]
) -> Iterator[bool]:
    for seed in seeds:
        try:
            seen += walk_once(seed)
        except Exception:  # noqa: BLE001 (a walk that fails is a row that is not met)
            print(f"       walk {seed}: {traceback.format_exc()}")
            yield False
        else:
            yield True
