"""Wrong: the mean by which its best checkpoint is kept begins again after a resume."""

import numpy as np

from perdure import CheckpointManager, ManagerOptions, Retention

LOSSES = [9, 5, 8, 1]
losses = []
keep = ManagerOptions(retention=Retention(best_metric="loss", best_mode="min"))
with CheckpointManager("runs/mine", max_to_keep=1, options=keep) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40)})
    for step in range(start, 4):
        state = {"w": state["w"] + np.random.default_rng(step).normal(size=40)}
        losses.append(LOSSES[step])
        manager.save(step + 1, state, {"loss": sum(losses) / len(losses), "seconds": id(losses)})
