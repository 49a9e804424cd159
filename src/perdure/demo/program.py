"""The training loop of the demo, the same for both engines.

It reports its progress to the driver as JSON lines on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure import ArrayDataset, CheckpointManager
from perdure.demo.digits import load_digits
from perdure.demo.guards import random_numbers_by_device, sums_by_all_reduce
from perdure.demo.phases import BATCH, GUARDS, REPLICAS, SAVE_EVERY
from perdure.errors import WorkerLostError

KEEP = 3


@dataclass(frozen=True)
class DemoProgram:
    """The functions that differ between the engines."""

    engine: str
    make_strategy: Callable[[int, int, int, bool], Any]
    init: Callable[[int], Any]
    grad: Callable[..., Any]
    update: Callable[..., Any]
    evaluate: Callable[..., Any]
    all_reduce: Callable[..., Any]


def main(program: DemoProgram) -> None:
    """Train up to `--steps`, from the newest checkpoint in `--run`."""
    options = _options()
    try:
        _train(program, options)
    except WorkerLostError as error:
        # A normal exit would wait for the lost worker in the shutdown of the framework.
        _report("lost", error=str(error))
        os._exit(1)


def _train(program: DemoProgram, options: argparse.Namespace) -> None:
    strategy = program.make_strategy(
        options.devices, REPLICAS, options.seed, "TF_CONFIG" in os.environ
    )
    digits = load_digits(options.data)
    train = ArrayDataset(digits.train, BATCH, seed=options.seed)
    if options.without == "rng":
        random_numbers_by_device(strategy)
    if options.without == "tree":
        sums_by_all_reduce(strategy, program.all_reduce)
    train_step = strategy.step(program.grad, program.update)
    with CheckpointManager(
        options.run,
        max_to_keep=KEEP,
        save_interval_steps=SAVE_EVERY,
        recipe=strategy.recipe(train),
        processes=strategy.processes,
    ) as manager:
        state, start = manager.restore_or_initialize(lambda: program.init(options.seed))
        origin = start if options.without == "position" else 0
        _report("start", step=start)
        for step in range(start, options.steps):
            state, loss = train_step(state, strategy.batch(train, step - origin))
            is_last = step + 1 == options.steps
            is_due = is_last or manager.should_save(
                step + 1
            )  # to read the loss waits for the device
            manager.save(step + 1, state, _metrics(loss) if is_due else None, force=is_last)
            _report("step", step=step + 1)
            if manager.reached_preemption(step + 1):
                manager.save_and_exit(step + 1, state, _metrics(loss))
    test = ArrayDataset(digits.test, BATCH, shuffle=False)
    right = weight = 0.0
    for step in range(test.steps_per_epoch):
        counts = strategy.run(program.evaluate, (state, strategy.batch(test, step)))
        total = strategy.reduce("sum", counts)
        right, weight = right + float(total["right"]), weight + float(total["weight"])
    _report("done", accuracy=right / weight, examples=int(weight))


def _metrics(loss: Any) -> dict[str, float]:
    """The mean loss of a step."""
    return {"loss": float(loss["sum"]) / float(loss["weight"])}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--devices", type=int, default=1, help="local devices to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="MNIST files")
    parser.add_argument("--without", choices=sorted(GUARDS), help="remove one guard")
    return parser.parse_args()


def _report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)  # noqa: T201 (the driver reads it)
