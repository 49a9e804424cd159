"""Wrong: what follows its loop needs a value of the loop, so it fails after its last checkpoint."""

import numpy as np

from perdure import CheckpointManager

with CheckpointManager("runs/mine") as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40)})
    for step in range(start, 2):
        state = {"w": state["w"] + np.random.default_rng(step).normal(size=40)}
        loss = float(np.abs(state["w"]).sum())
        manager.save(step + 1, state)
assert loss > 0  # pyright: ignore[reportPossiblyUnboundVariable]
