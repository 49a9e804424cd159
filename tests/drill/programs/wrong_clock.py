"""Wrong: the learning rate falls with the time of day."""

import time

import numpy as np

from perdure import CheckpointManager

STEPS, EVERY = 12, 2
examples = np.random.default_rng(0).normal(size=(96, 40))


def update(w, step):
    batch = examples[step * 8 : step * 8 + 8]
    rate = 0.05 / (1 + time.time() % 10)
    return w - rate * (batch.T @ (batch @ w - batch.sum(1)))


with CheckpointManager("runs/clock", save_interval_steps=EVERY) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "step": 0})
    for step in range(start, STEPS):
        state = {"w": update(state["w"], step), "step": step + 1}
        manager.save(step + 1, state)
