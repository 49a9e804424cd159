"""Trains a few numbers and records every step; the arguments change one line of it."""

import os
import sys
import time

import numpy as np

from perdure import CheckpointManager, ManagerOptions

arguments = dict(argument.split("=") for argument in sys.argv[1:])
every = int(arguments.get("every", 1)) or None
seed = int(arguments.get("seed", 0))
rate = float(arguments.get("rate", 0.1))
with CheckpointManager(
    os.path.join("runs", arguments.get("run", "mine")),
    max_to_keep=None,
    save_interval_steps=4,
    options=ManagerOptions(journal_every=every),
    recipe={"seed": seed},
) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(40), "b": np.zeros(2)})
    for step in range(start, int(arguments.get("steps", 13))):
        change = np.random.default_rng([seed, step]).normal(size=40)
        if step == 9:
            change = change * rate * 10
            if "clock" in arguments:
                change = change + time.time_ns() % 997
            if "draws" in arguments:  # from a generator that nobody seeded
                change = change + np.random.random()  # noqa: NPY002
        state = {"w": state["w"] + change, "b": state["b"]}
        manager.save(step + 1, state)
