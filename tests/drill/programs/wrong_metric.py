"""Wrong: the mean loss is saved, and the sums behind it are not."""

import numpy as np

from perdure import CheckpointManager

STEPS, EVERY = 12, 2
examples = np.random.default_rng(0).normal(size=(96, 40))
total = count = 0.0

with CheckpointManager("runs/metric", save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize(
        {"w": np.zeros(40), "step": 0, "metrics": {"loss": np.float64(0)}}
    )
    for step in range(start, STEPS):
        batch = examples[step * 8 : step * 8 + 8]
        error = batch @ state["w"] - batch.sum(1)
        total, count = total + (error**2).sum(), count + len(batch)
        state = {
            "w": state["w"] - 0.05 * (batch.T @ error),
            "step": step + 1,
            "metrics": {"loss": np.float64(total / count)},
        }
        manager.save(step + 1, state)
