"""Wrong: dropout draws from NumPy's global generator, whose state is not in the checkpoint."""

import numpy as np

from perdure import CheckpointManager

STEPS, EVERY = 12, 2
np.random.seed(7)  # noqa: NPY002 (what is wrong here)
examples = np.random.default_rng(0).normal(size=(96, 40))


def update(w, step):
    batch = examples[step * 8 : step * 8 + 8]
    kept = np.random.random(40) < 0.9  # noqa: NPY002
    return w - 0.05 * kept * (batch.T @ (batch @ w - batch.sum(1)))


with CheckpointManager("runs/generator", save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "step": 0})
    for step in range(start, STEPS):
        state = {"w": update(state["w"], step), "step": step + 1}
        manager.save(step + 1, state)
