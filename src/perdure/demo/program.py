"""The training loop of the demo, the same for both engines.

It reports its progress to the driver as JSON lines on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from perdure import ArrayDataset, CheckpointManager
from perdure.demo import BATCH, GUARDS, REPLICAS, SAVE_EVERY
from perdure.demo.digits import load_digits
from perdure.distribute.engine import Engine, Stream
from perdure.distribute.reduction import Agreement, Reduction
from perdure.distribute.topology import Plan
from perdure.errors import WorkerLostError

KEEP = 3


def main(program: Any) -> None:
    """Train up to `--steps` from the newest checkpoint; `program` has what differs between engines."""
    options = _options()
    try:
        _train(program, options)
    except WorkerLostError as error:
        # A normal exit would wait for the lost worker in the shutdown of the framework.
        _report("lost", error=str(error))
        os._exit(1)


def _train(program: Any, options: argparse.Namespace) -> None:
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
            # To read the loss waits for the device.
            is_due = is_last or manager.should_save(step + 1)
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
    return {"loss": float(loss["sum"]) / float(loss["weight"])}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--devices", type=int, default=1, help="local devices to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="MNIST files")
    parser.add_argument("--without", choices=GUARDS, help="remove one guard")
    return parser.parse_args()


def _report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)  # noqa: T201 (the driver reads it)


# What perdure keeps a user from: random numbers that follow the device, and sums whose order follows
# the number of devices. Without one of its guards, the demo can be seen to FAIL.

AllReduce = Callable[[Any, list[Any]], Any]


def random_numbers_by_device(strategy: Any) -> None:
    """Draw from one stream for each device instead of one for each logical replica."""
    plan: Plan = strategy._plan
    plan.engine = _DeviceStreams(plan)  # type: ignore[assignment]


def sums_by_all_reduce(strategy: Any, all_reduce: AllReduce) -> None:
    """Add up on each device in a row, then let the framework add over the devices."""
    one_by_one(strategy)
    plan: Plan = strategy._plan
    plan.control = lambda: _PlainSum(plan, all_reduce)


def one_by_one(strategy: Any) -> None:
    """Turn the fused step off, which would bypass the guard that is taken out."""
    strategy._plan.engine = _OneByOne(strategy._plan.engine)


class _OneByOne:
    """The verbs of another engine, save for the one that does a whole step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def fused_step(self, *_: Any) -> str:
        return "a guard is taken out"


class _DeviceStreams(_OneByOne):
    """An engine whose streams know the device and the turn on it, not the replica."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.engine)
        first_device = sum(plan.engine.devices_per_process[: plan.engine.processes.index])
        self._streams = {
            replica: (first_device + device) * 1000 + replica - start
            for device, (start, stop) in enumerate(plan.local)
            for replica in range(start, stop)
        }

    def grad(self, fn: Any, state: Any, share: Any, stream: Stream) -> Any:
        changed = stream._replace(replica=self._streams[stream.replica])
        return self._engine.grad(fn, state, share, changed)


class _PlainSum(Reduction):
    def __init__(self, plan: Plan, all_reduce: AllReduce) -> None:
        super().__init__(plan)
        self._all_reduce = all_reduce
        self._sums: dict[int, Any] = {}

    def push(self, device: int, replica: int, value: Any) -> None:
        held = self._sums.get(device)
        self._sums[device] = value if held is None else self._plan.engine.add(held, value)

    def close(self) -> None:
        pass  # `total` adds

    def total(self, agreement: Agreement | None = None, at: str = "") -> Any:
        return self._all_reduce(self._plan.engine, [self._sums[d] for d in sorted(self._sums)])
