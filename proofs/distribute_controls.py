"""Negative controls: each removes one thing that makes the bits independent of the topology.

Trains the tutorial's CNN with Adam and prints the fingerprint of the real thing and of each control.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distribute"))

from matrix_worker import fingerprint, tell, train
from training_case import FIRST, REPLICAS, STEPS, dataset, strided

from perdure.demo.program import one_by_one, random_numbers_by_device, sums_by_all_reduce
from perdure.distribute.reduction import Reduction, reduction_of

MODEL = "tutorial's CNN"
# 8 examples per replica: with fewer, the size of the thread pool would change nothing.
BATCH = 64


class Reversed(Reduction):
    """Adds the most distant replicas first (4, 2, 1), as a butterfly from the other end does."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self._values: dict[int, Any] = {}

    def push(self, device: int, replica: int, value: Any) -> None:
        """Keep the value."""
        self._values[replica] = value

    def close(self) -> None:
        """Nothing: `total` adds."""

    def total(self, agreement: Any = None, at: str = "") -> Any:
        """The sum over all replicas, all of which this process runs."""
        engine = self._plan.engine
        values = [engine.put(value, engine.devices[0]) for _, value in sorted(self._values.items())]
        while len(values) > 1:
            half = len(values) // 2
            values = [engine.add(values[i], values[i + half]) for i in range(half)]
        return values[0]


def vmapped(strategy: Any, cell: Any) -> str:
    """On JAX, the gradients of all replicas of a device in one vmapped program, then the same tree."""
    import jax

    plan = strategy._plan
    together = jax.jit(jax.vmap(cell.grad, (None, 0, 0)))
    update, state, data = jax.jit(cell.update), cell.init(), dataset(BATCH)
    logs: Any = {}
    for step in range(FIRST, FIRST + STEPS):
        batch, keys = strategy.batch(data, step), strategy.keys(step)
        reduction = reduction_of(plan)
        for device, (start, stop) in enumerate(plan.local):
            shares = jax.tree.map(lambda *leaves: np.stack(leaves), *batch.values[start:stop])
            stacked = jax.tree.map(
                lambda *leaves: jax.numpy.stack(leaves), *keys.values[start:stop]
            )
            values = together(state, shares, stacked)
            for place, replica in enumerate(range(start, stop)):
                one = jax.tree.map(lambda leaf, place=place: leaf[place], values)
                reduction.push(device, replica, one)
        state, logs = update(state, reduction.total())
    return fingerprint({"state": state, "logs": logs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("jax", "torch"), required=True)
    parser.add_argument("--devices", default="1", help="numbers of devices, by comma")
    parser.add_argument("--threads", type=int, help="another size of the thread pool, and no more")
    options = parser.parse_args()
    group = "TF_CONFIG" in os.environ
    engine = import_module(f"matrix_{options.engine}")
    demo = import_module(f"perdure.demo.train_{options.engine}")
    cell = engine.MODELS[MODEL](REPLICAS)["adam"]

    def make(devices: str) -> Any:
        return engine.make_strategy(devices, REPLICAS, group)

    if options.threads:
        strategy = engine.MirroredStrategy(replicas=REPLICAS, threads=options.threads)
        digest = train(strategy, cell, dataset(BATCH))
        tell(event="control", name="another thread-pool size", devices=1, fingerprint=digest)
        return
    for devices in options.devices.split(","):

        def plain(strategy: Any) -> str:
            return train(strategy, cell, dataset(BATCH))

        def all_reduce(strategy: Any) -> str:
            sums_by_all_reduce(strategy, demo.all_reduce)
            return plain(strategy)

        def rng(strategy: Any) -> str:
            random_numbers_by_device(strategy)
            return plain(strategy)

        def rows(strategy: Any) -> str:
            count = sum(strategy._plan.engine.devices_per_process)
            return train(strategy, cell, strided(count, BATCH))

        def backwards(strategy: Any) -> str:
            one_by_one(strategy)
            plan = strategy._plan
            plan.control = lambda: Reversed(plan)
            return plain(strategy)

        trials: dict[str, Callable[[Any], str]] = {
            "the real thing": plain,
            "psum" if options.engine == "jax" else "all_reduce": all_reduce,
            "random numbers by device": rng,
            "strided rows": rows,
        }
        if not group:
            trials["reversed tree"] = backwards
            if options.engine == "jax":
                trials["vmap over replicas"] = lambda strategy: vmapped(strategy, cell)
        for name, trial in trials.items():
            strategy = make(devices)
            count = sum(strategy._plan.engine.devices_per_process)
            tell(event="control", name=name, devices=count, fingerprint=trial(strategy))


if __name__ == "__main__":
    main()
