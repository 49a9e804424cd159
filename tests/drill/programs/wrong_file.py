"""Wrong: its momentum lies in a file that is written at the end; or it removes its run directory."""

import os
import shutil
import sys

import numpy as np

from perdure import CheckpointManager

if "remove" in sys.argv:
    shutil.rmtree("runs/mine", ignore_errors=True)
with CheckpointManager("runs/mine") as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40)})
    known = dict(np.load("momentum.npz")) if start and os.path.exists("momentum.npz") else {}
    momentum = known.get(str(start), np.zeros(40))
    for step in range(start, 2):
        momentum = 0.9 * momentum + np.random.default_rng(step).normal(size=40)
        known[str(step + 1)] = momentum
        state = {"w": state["w"] - momentum}
        manager.save(step + 1, state)
np.savez("momentum.npz", **known)
