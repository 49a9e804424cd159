"""A hand-written loop with a journal: `plain_loop.py jax|torch|numpy NAME=VALUE ...`.

There is no strategy. The loop draws from NumPy's global generator, and records its batches. The names
are those of strategy_step.py; `plant=generator at=STEP` draws one number more before a step, and
`keep=DIRECTORY` leaves a copy of the run directory there when the loop ends.
"""

import os
import shutil
import signal
import sys
import tempfile
from typing import Any

import numpy as np

from perdure import CheckpointManager, ManagerOptions

framework, *pairs = sys.argv[1:]
given = dict(pair.split("=") for pair in pairs)
plant, at = given.get("plant", ""), int(given.get("at", 0))
rate = float(given.get("rate", 0.1))
chance = np.random.default_rng(0)
x = chance.normal(size=(256, 8)).astype(np.float32)
y = np.sin(x.sum(1)).astype(np.float32)


def slope(w: Any, rows: Any, targets: Any) -> Any:
    return rows.T @ (rows @ w - targets) / len(rows)


if framework == "jax":
    import jax

    slope = jax.jit(slope)
    start_w: Any = jax.numpy.zeros(8)
elif framework == "torch":
    import torch

    torch.set_num_threads(1)
    start_w = torch.zeros(8)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
else:
    start_w = np.zeros(8, np.float32)

np.random.seed(7)  # noqa: NPY002 (the generator that programs share)
with CheckpointManager(
    os.path.join("runs", given.get("run", "plain")),
    max_to_keep=None,
    save_interval_steps=4,
    options=ManagerOptions(journal_every=1),
    recipe={},
) as manager:
    state, start = manager.restore_or_initialize({"w": start_w})
    for step in range(start, int(given.get("steps", 13))):
        now = rate if step == 6 else 0.1
        if plant == "generator" and step + 1 == at:
            np.random.random()  # noqa: NPY002
        rows = (step * 32 + np.arange(32)) % 256
        if plant == "batch" and step + 1 == at:
            rows = rows[::-1].copy()
        noise = 1 + float(np.random.random()) / 16  # noqa: NPY002
        change = slope(state["w"], x[rows], y[rows])
        state = {"w": state["w"] - now * noise * change}
        manager.journal.record(step + 1, state, {"x": x[rows], "y": y[rows]})
        manager.save(step + 1, state)
        if step + 1 == int(given.get("kill", 0)):
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)

if "keep" in given:
    copy = os.path.join(tempfile.mkdtemp(dir=given["keep"]), "run")
    shutil.copytree(manager.directory, copy)
