"""Trains a few numbers without a strategy, and saves them; the argument says what is odd."""

import os
import sys

import numpy as np

from perdure import CheckpointManager
from perdure.store import Run

odd = sys.argv[1]
rng = np.random.default_rng(None if odd == "unseeded" else 1)
state = {"w": np.zeros(4), "b": np.zeros(2)}
if odd == "checkpoints":
    from perdure.state import flatten

    with Run("runs/mine", create=True) as run:
        run.save(1, flatten(state))
elif odd != "nothing":
    with CheckpointManager("runs/mine") as manager:
        state, start = manager.restore_or_initialize(state)
        assert start == 0
        manager.save(0, state)
        for step in range(100):
            noise = os.getpid() if odd == "second" and step else 0
            state = {"w": state["w"] + rng.normal(size=4) + noise, "b": state["b"]}
            manager.save(step + 1, state)
            if odd == "short":
                break
            assert step < 2, "the doctor ends the program after two steps"
