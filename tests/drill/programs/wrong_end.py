"""As it should be, and then its second life cuts off every file that it has written."""

import os
from pathlib import Path

import numpy as np

from perdure import CheckpointManager

with CheckpointManager("runs/mine", max_to_keep=2) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40)})
    for step in range(start, 6):
        state = {"w": state["w"] + np.random.default_rng(step).normal(size=40)}
        manager.save(step + 1, state)

if os.environ["PERDURE_ATTEMPT"] == os.environ.get("SPOILS", "2"):
    for pack in Path(os.environ["PERDURE_DRILL"]).glob("runs/*/packs/*"):
        os.truncate(pack, pack.stat().st_size // 2)
