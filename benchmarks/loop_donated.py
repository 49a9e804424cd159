"""What a save takes from a loop whose step is given its state: perdure and Orbax, in turns.

    loop_donated.py SUBJECT DIRECTORY     the milliseconds of each save, as JSON

A save and the step after it are measured, less an ordinary step: JAX copies an array that a step is
given while a save holds it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
LEAVES, LEAF = 16, 200 * 1024 * 1024 // 16
SAVES, ORDINARY = 8, 10


def added(rounds: int) -> dict[str, list[float]]:
    """The median of each round by subject, each in a process of its own."""
    medians: dict[str, list[float]] = {"perdure": [], "Orbax": []}
    for _ in range(rounds):
        for subject, series in medians.items():
            with tempfile.TemporaryDirectory(prefix="perdure-bench-") as where:
                command = [sys.executable, __file__, subject, where]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                series.append(statistics.median(json.loads(done.stdout.splitlines()[-1])))
    return medians


def _saves(subject: str, where: Path) -> Any:
    """(save, wait) of a manager that keeps one checkpoint."""
    if subject == "perdure":
        from perdure import CheckpointManager

        manager: Any = CheckpointManager(where / "run", max_to_keep=1)
        return manager.save, manager.wait_until_finished
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(
        where / "run", options=ocp.CheckpointManagerOptions(max_to_keep=1)
    )
    return (
        lambda step, state: manager.save(step, args=ocp.args.StandardSave(state)),
        manager.wait_until_finished,
    )


def measured(subject: str, where: Path) -> list[float]:
    import jax
    import jax.numpy as jnp

    @partial(jax.jit, donate_argnums=0)
    def train(state: Any) -> Any:
        return jax.tree.map(lambda w: w * 0.999 + 0.001, state)

    state = {f"w{n}": jnp.full(LEAF // 4, 1.0 + n) for n in range(LEAVES)}
    save, wait = _saves(subject, where)
    extra = []
    for number in range(1, SAVES + 3):
        times = []
        for _ in range(ORDINARY):
            start = time.perf_counter()
            state = jax.block_until_ready(train(state))
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        save(number, state)
        state = jax.block_until_ready(train(state))
        extra.append(1e3 * (time.perf_counter() - start - statistics.median(times)))
        wait()
    return extra[2:]  # the first saves make the directory and get their memory


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]))))
