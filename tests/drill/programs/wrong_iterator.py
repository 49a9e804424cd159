"""Wrong: after a resume the data come from the beginning again."""

import numpy as np

from perdure import CheckpointManager

STEPS, EVERY = 12, 2
examples = np.random.default_rng(0).normal(size=(96, 40))


def batches():
    order = np.random.default_rng(5).permutation(96)
    for at in range(0, 96, 8):
        yield examples[order[at : at + 8]]


with CheckpointManager("runs/iterator", save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "step": 0})
    for step, batch in zip(range(start, STEPS), batches(), strict=False):
        w = state["w"]
        w = w - 0.05 * (batch.T @ (batch @ w - batch.sum(1)))
        state = {"w": w, "step": step + 1}
        manager.save(step + 1, state)
