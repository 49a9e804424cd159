"""The network of `perdure demo` with a journal: `demo.py jax|torch run=NAME steps=N other=STEP`.

With `other=STEP` that step takes the batch of another one.
"""

import importlib
import os
import sys

from perdure import ArrayDataset, CheckpointManager, ManagerOptions
from perdure.demo import BATCH, REPLICAS
from perdure.demo.digits import load_digits

engine, *pairs = sys.argv[1:]
given = dict(pair.split("=") for pair in pairs)
demo = importlib.import_module(f"perdure.demo.train_{engine}")
devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", 1))
strategy = demo.make_strategy(devices, REPLICAS, 3, "TF_CONFIG" in os.environ)
data = ArrayDataset(load_digits(None).train, BATCH, seed=3)
with CheckpointManager(
    os.path.join("runs", given["run"]),
    max_to_keep=3,
    save_interval_steps=5,
    options=ManagerOptions(journal_every=1),
    recipe=strategy.recipe(data),
    processes=strategy.processes,
) as manager:
    train_step = strategy.step(demo.grad, demo.update, journal=manager.journal)
    state, start = manager.restore_or_initialize(lambda: demo.init(3))
    for step in range(start, int(given["steps"])):
        position = 2 if step + 1 == int(given.get("other", 0)) else step
        state, _ = train_step(state, strategy.batch(data, position))
        manager.save(step + 1, state)
