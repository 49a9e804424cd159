"""As it should be: looks into its own run directory, writes into it, and copies it when it is done."""

import os
import shutil

import numpy as np

from perdure import CheckpointManager

is_resumed = os.path.isdir("runs/mine")
with CheckpointManager("runs/mine") as manager:
    state, start = {"w": np.zeros(40)}, 0
    if is_resumed:
        state, start = manager.restore_or_initialize(state)
    os.makedirs("runs/mine", exist_ok=True)
    with open("runs/mine/config.txt", "w") as file:
        file.write("rate 0.1")
    for step in range(start, 2):
        state = {"w": state["w"] + np.random.default_rng(step).normal(size=40)}
        manager.save(step + 1, state)
shutil.copytree("runs/mine", "archive", dirs_exist_ok=True)
