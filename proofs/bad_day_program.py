"""The training program of the bad day: examples/cluster/train.py, paced, with a mirror in a bucket.

It writes one JSON line for every step of process 0 and for every jump of a clock to `--journal`. When
the file `jump` is in the directory of the journal, the clock of the process jumps by 40 days, once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from perdure import ArrayDataset, CheckpointManager, ManagerOptions
from perdure.errors import WorkerLostError
from perdure.store import CloudOptions, CloudStorage

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "cluster"
REPLICAS = 8
JUMP_S = 40 * 24 * 3600.0
# A bucket that does not answer is given up after some seconds, until the next save.
PATIENCE = {"retries": 2, "retry_seconds": 5.0, "lease_seconds": 10.0}
CLIENT = {"timeout": "3s", "connect_timeout": "2s"}


class Journal:
    """Lines of JSON in a file that all attempts append to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._attempt = f"{os.environ.get('PERDURE_ATTEMPT')}-{os.getppid()}"

    def write(self, **fields: Any) -> None:
        line = {"attempt": self._attempt, "t": time.monotonic(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Clock:
    """`time.time` for the run directory; `jump` moves it, and that of the whole process."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._has_jumped = False

    def __call__(self) -> float:
        return time.time()

    def look(self, journal: Journal, process: int) -> None:
        """Jump if that was ordered."""
        if not self._has_jumped and self._order.exists():
            self._has_jumped = True
            real = time.time
            time.time = lambda: real() + JUMP_S
            journal.write(jumped=process)


def bucket(url: str, endpoint: str) -> CloudStorage:
    """The run directory in the bucket."""
    config = {"endpoint": endpoint, "region": "us-east-1"}
    config |= {"access_key_id": "test", "secret_access_key": "test"}
    return CloudStorage(url, CloudOptions(config=config, client=CLIENT, **PATIENCE))


def train(options: argparse.Namespace) -> None:
    # Here, because the proof imports `bucket` and needs no JAX.
    sys.path.insert(0, str(EXAMPLE))
    example: Any = import_module("train")
    from perdure.jax import MultiWorkerMirroredStrategy

    journal = Journal(options.journal)
    clock = Clock(options.journal.parent / "jump")
    mirror = None
    if options.mirror is not None:
        url, endpoint = options.mirror
        mirror = bucket(url, endpoint)
    strategy = MultiWorkerMirroredStrategy(replicas=REPLICAS)
    data = ArrayDataset(example.examples(), example.BATCH, seed=0)
    step_fn = strategy.step(example.grad, example.update)
    with CheckpointManager(
        options.run,
        mirror=mirror,
        save_interval_steps=options.save_every,
        options=ManagerOptions(on_error="continue", clock=clock, mirror_wait=60),
        recipe=strategy.recipe(data),
        processes=strategy.processes,
    ) as manager:
        state, start = manager.restore_or_initialize(example.init)
        for step in range(start, options.steps):
            began = time.monotonic()
            state, _ = step_fn(state, strategy.batch(data, step))
            manager.save(step + 1, state, force=step + 1 == options.steps)
            clock.look(journal, strategy.processes.index)
            if options.pace:
                time.sleep(max(0.0, options.pace - (time.monotonic() - began)))
            if strategy.is_chief:
                journal.write(step=step + 1)
        manager.wait_until_finished(mirror=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds that a step takes at least"
    )
    parser.add_argument("--mirror", nargs=2, metavar=("URL", "ENDPOINT"))
    try:
        train(parser.parse_args())
    except WorkerLostError as error:
        print(f"bad_day_program.py: {error}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
