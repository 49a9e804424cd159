"""Wrong: dropout draws from a generator of the program's own, which is not in the state."""

import numpy as np

from perdure import CheckpointManager

STEPS, EVERY = 12, 2
generator = np.random.default_rng(7)  # wrong: a member of the state would be restored
examples = np.random.default_rng(0).normal(size=(96, 40))


def update(w, step):
    batch = examples[step * 8 : step * 8 + 8]
    kept = generator.random(40) < 0.9
    return w - 0.05 * kept * (batch.T @ (batch @ w - batch.sum(1)))


with CheckpointManager("runs/generator", save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "step": 0})
    for step in range(start, STEPS):
        state = {"w": update(state["w"], step), "step": step + 1}
        manager.save(step + 1, state)
