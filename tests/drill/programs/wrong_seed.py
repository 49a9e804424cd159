"""Wrong: the first weights come from a generator without a seed."""

import numpy as np

from perdure import CheckpointManager

with CheckpointManager("runs/seed", save_interval_steps=2) as manager:
    state, start = manager.restore_or_initialize({"w": np.random.default_rng().normal(size=40)})
    for step in range(start, 6):
        state = {"w": state["w"] * 0.9}
        manager.save(step + 1, state)
