"""The loader: how long a training step waits for its batch, and the memory of a billion examples.

A part of bench_distribute; `python benchmarks/distribute_loader.py` runs it alone. The step
is that of the tutorial's network in PyTorch, at global batch 128 with 2 logical replicas, on as many
examples as MNIST has, filled with noise, because the time does not depend on the images.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
from table import Row, compared, row

from perdure.data import ArrayDataset, Augment, Dataset, Prefetch

EXAMPLES = 60_000
BATCH = 128
REPLICAS = 2
WARM = 5
STEPS = 60
SMALL, LARGE = 10**4, 10**9


class Waiting:
    """A dataset that records how long its caller waited for each part of a batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.batch_size = dataset.batch_size
        self.seconds = 0.0

    def recipe(self) -> Any:
        return self._dataset.recipe()

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        begin = time.perf_counter()
        batch = self._dataset.batch(step, replica, replicas)
        self.seconds += time.perf_counter() - begin
        return batch


class Numbers:
    """Any number of examples, which are made when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return np.full(64, number, np.float32)


def shift(batch: Any, keys: Any) -> Any:
    """Move every image by 0 to 3 pixels along each axis, by its own key."""
    down, right = keys[:, 0] & 3, keys[:, 1] & 3
    wide = np.pad(batch["image"], ((0, 0), (0, 3), (0, 3), (0, 0)))
    rows = np.arange(28)[None, :, None] + down[:, None, None]
    columns = np.arange(28)[None, None, :] + right[:, None, None]
    moved = wide[np.arange(len(wide))[:, None, None], rows, columns]
    return {**batch, "image": moved}


def images() -> Row:
    rng = np.random.default_rng(0)
    image = rng.random((EXAMPLES, 28, 28, 1), np.float32)
    return {"image": image, "label": rng.integers(0, 10, EXAMPLES, np.int32)}


def waited(dataset: Any) -> tuple[float, float]:
    """The median seconds that a step waits for its batch, and those of a step."""
    from perdure.demo.train_torch import grad, init, update
    from perdure.torch import MirroredStrategy

    strategy = MirroredStrategy(replicas=REPLICAS)
    train_step = strategy.step(grad, update)
    state, data = init(0), Waiting(dataset)
    waits, steps = [], []
    for step in range(WARM + STEPS):
        begin, data.seconds = time.perf_counter(), 0.0
        state, _ = train_step(state, strategy.batch(data, step))
        waits.append(data.seconds)
        steps.append(time.perf_counter() - begin)
    return statistics.median(waits[WARM:]), statistics.median(steps[WARM:])


def wait_rows() -> Iterator[Row]:
    """The fraction of a step spent waiting, whose goal is at most 1%."""
    arrays = images()
    plain = ArrayDataset(arrays, BATCH, fingerprint="noise")
    moved = ArrayDataset(arrays, BATCH, fingerprint="noise", augment=Augment(shift, batched=True))
    with Prefetch(plain) as ahead, Prefetch(moved) as moved_ahead:
        for what, dataset, has_limit in [
            ("arrays, prefetched", ahead, True),
            ("arrays, not prefetched", plain, False),
            ("arrays with random shifts, prefetched", moved_ahead, True),
            ("arrays with random shifts, not prefetched", moved, False),
        ]:
            wait, step = waited(dataset)
            text = f"loader, MNIST size, {what}: share of a step that waits"
            spread = f"a step of {step * 1e3:.1f} ms; waits {wait * 1e6:.0f} us"
            mine = row(text, 100 * wait / step, "%", spread)
            yield compared(mine, "", 1.0, most=1.0) if has_limit else mine


def peak(length: int) -> int:
    """Peak bytes of Python's and NumPy's memory while batches of four epochs are made."""
    tracemalloc.start()
    data = Dataset(Numbers(length), BATCH, fingerprint="numbers")
    for epoch in range(4):
        for within in (0, 1, data.steps_per_epoch // 2, data.steps_per_epoch - 1):
            data.batch(epoch * data.steps_per_epoch + within)
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return nbytes


def memory_row() -> Row:
    """Compare 10^9 examples with 10^4."""
    peak(100)  # allocations that happen once in a process
    small, large = peak(SMALL), peak(LARGE)
    text = "loader: peak memory of shuffled batches from 10^9 examples"
    return compared(row(text, large / 1024, "KiB"), "10^4 examples", small / 1024, most=1.01)


def rows() -> Iterator[Row]:
    """The rows of the loader in bench_distribute."""
    yield from wait_rows()
    yield memory_row()


if __name__ == "__main__":
    for line in rows():
        print(json.dumps(line))
