"""A loop of its own, as it should be: batch and random numbers are functions of the step."""

import numpy as np

from perdure import CheckpointManager

STEPS, EVERY = 16, 2
examples = np.random.default_rng(0).normal(size=(64, 40))


def update(w, step):
    batch = examples[step * 8 % 64 :][:8]
    noise = np.random.default_rng((1, step)).normal(size=40)
    return w - 0.05 * (batch.T @ (batch @ w - batch.sum(1))) + 0.001 * noise


with CheckpointManager("runs/right", max_to_keep=2, save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "step": 0})
    for step in range(start, STEPS):
        state = {"w": update(state["w"], step), "step": step + 1}
        manager.save(step + 1, state)
        if manager.reached_preemption(step + 1):
            manager.save_and_exit(step + 1, state)
