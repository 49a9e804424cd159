"""What an audit costs: steps in which one replica of each device is computed a second time.

    audit_cost.py ENGINE MODEL BATCH REPLICAS DEVICES BLOCKS STEPS

As a program, it trains and answers with one line of JSON: for each block of steps, the milliseconds of
a step without an audit and of one with `audit=1`. The blocks alternate.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from distribute_case import data
from store_probe import spread
from table import Row, compared, row

from perdure.distribute import PerReplica

CASES = (
    ("cnn", 128, 8, 1, "the tutorial's network, V=8 on one device"),
    ("transformer", 32, 8, 1, "a small transformer, V=8 on one device"),
    ("cnn", 128, 2, 2, "the tutorial's network, V=2 on two devices"),
    ("transformer", 32, 2, 2, "a small transformer, V=2 on two devices"),
)
WARM = 6
RATE = 0.01
REACH = 1.2  # percent of the time


def measure(engine: str, model: str, *numbers: str) -> list[tuple[float, float]]:
    batch, replicas, devices, blocks, steps = map(int, numbers)
    cases: Any = importlib.import_module(f"distribute_{engine}")
    strategy = cases.MirroredStrategy(devices, replicas)
    state, grad, update = (
        cases._functions(model)
        if engine == "jax"
        else (cases._state(model), cases.grad, cases.update)
    )
    shares = tuple(zip(*(np.split(part, replicas) for part in data(model, batch)), strict=True))
    variants = [strategy.step(grad, update, audit=audit) for audit in (0, 1)]
    number = 0

    def block(train_step: Any, count: int) -> float:
        nonlocal state, number
        start = time.perf_counter()
        for _ in range(count):
            share = PerReplica(shares, strategy.local_replicas, number)
            state, loss = train_step(state, share)
            float(loss)  # waits for the step
            number += 1
        return 1e3 * (time.perf_counter() - start) / count

    for variant in variants:
        block(variant, WARM)
    return [(block(variants[0], steps), block(variants[1], steps)) for _ in range(blocks)]


def audit_rows(blocks: int, steps: int) -> Iterator[Row]:
    """A step with `audit=0.01` beside the step without it, from the cost of an audited step."""
    for engine in ("jax", "torch"):
        for model, batch, replicas, devices, name in CASES:
            numbers = map(str, (batch, replicas, devices, blocks, steps))
            ended = subprocess.run(
                [sys.executable, __file__, engine, model, *numbers],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": str(devices),
                },
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(ended.stdout.splitlines()[-1])
            bare = statistics.median(bare for bare, _ in found)
            ratios = [audited / plain for plain, audited in found]
            middle = statistics.median(ratios)
            against = f"step without an audit, {bare:.1f} ms"
            text = f"audit, {engine}, {name}"
            yield row(
                f"{text}: audited step", middle, "x", spread(ratios), against=against, ratio=middle
            )
            percent = 100 * RATE * (middle - 1)
            figure = row(f"{text}: at audit={RATE:g}", percent, "%")
            yield compared(figure, against, REACH, most=REACH)


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
