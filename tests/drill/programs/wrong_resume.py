"""Wrong: cannot go on from a checkpoint at all."""

import numpy as np

from perdure import CheckpointManager

with CheckpointManager("runs/resume", save_interval_steps=2) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40)})
    momentum = {step: np.ones(40) for step in range(12)} if start == 0 else {}
    for step in range(start, 12):
        state = {"w": state["w"] + momentum[step]}
        manager.save(step + 1, state)
