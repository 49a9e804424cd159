"""A run with a mirror, killed on either side at random operations. A part of `make proof-store`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from report import Row, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "checkpoint"))

from mirror_cases import Story, manifest_first

RUNS = 200
CONTROLS = 20


def mirror_rows(_work: Path) -> Iterator[Row]:
    """Both sides stay readable and a restore finds the newest reported checkpoint; and the control."""
    kills = saves = 0

    def held(seed: int) -> bool:
        nonlocal kills, saves
        story = Story(seed).play()
        kills += story.kills
        saves += story.moved
        for lost in story.lost[:3]:
            print(f"       seed {seed}: {lost}")
        return not story.lost

    yield row(
        "runs on two machines with one mirror, killed at random operations: every checkpoint on both "
        "sides is readable, and a restore finds the newest reported one",
        (held(seed) for seed in range(RUNS)),
    )
    print(f"       {kills} kills, {saves} saves and prunes in the middle of a copy")
    lost = sum(bool(Story(seed, manifest_first).play().lost) for seed in range(CONTROLS))
    yield row(
        f"control: with the manifest before its packs checkpoints are lost ({lost} of {CONTROLS} runs)",
        [lost > 0],
    )
