"""Right, and it commits by itself: nothing in its loop tells perdure of a step."""

import numpy as np

from perdure.store import Leaf, Run

with Run("runs/bare", create=True) as run:
    steps = run.steps()
    found = run.load(steps[-1]) if steps else None
    start = 0 if found is None else found.manifest.step
    w = np.zeros(8) if found is None else np.frombuffer(found.leaves["w"].data, np.float64)
    for step in range(start, 6):
        w = w + np.random.default_rng(step).normal(size=8)
        run.save(step + 1, {"w": Leaf("float64", (8,), memoryview(w.tobytes()))})
