"""Wrong: the momentum is not in the state. The noise is right: it is made from the step.

With an argument it has a journal, which finds the first difference.
"""

import sys

import numpy as np

from perdure import CheckpointManager, ManagerOptions

STEPS, EVERY = 12, 2
examples = np.random.default_rng(0).normal(size=(96, 40))
velocity = np.zeros(40)  # wrong: a member of the state would be restored

options = ManagerOptions(journal_every=1 if sys.argv[1:] else None)
with CheckpointManager("runs/momentum", save_interval_steps=EVERY, options=options) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "step": 0})
    for step in range(start, STEPS):
        batch = examples[step * 8 : step * 8 + 8]
        noise = np.random.default_rng(step)
        change = batch.T @ (batch @ state["w"] - batch.sum(1)) * noise.random(40)
        velocity = 0.9 * velocity + 0.01 * change
        state = {"w": state["w"] - velocity, "step": step + 1}
        manager.save(step + 1, state)
