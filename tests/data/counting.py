"""Counts the examples of an epoch over all workers, through changes of topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from perdure.distribute.topology import split

REPLICAS = 8
# Devices in each process.
TOPOLOGIES = [(1,), (3,), (8,), (1, 1), (1, 1, 1), (2, 2), (1, 1, 1, 1)]


class Lazy:
    """Examples that are made when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return {"n": number, "x": np.full(3, number, np.float32)}


def numbers_of(batch: Any) -> Any:
    return batch["n"]


def counted_by_worker(
    data: Any,
    topology: tuple[int, ...],
    worker: int,
    steps: range,
    number: Callable[[Any], Any] = numbers_of,
) -> dict[int, Counter[int]]:
    """How often one worker sees each example in its logical replicas, by epoch."""
    seen: dict[int, Counter[int]] = {}
    for step in steps:
        for first, last in split(REPLICAS, topology)[worker]:
            for replica in range(first, last):
                batch = data.batch(step, replica, REPLICAS)
                real = np.asarray(number(batch))[batch["weight"] == 1]
                seen.setdefault(data.epoch(step)[0], Counter()).update(real.tolist())
    if hasattr(data, "close"):
        data.close()
    return seen


def counted(
    make: Callable[[], Any],
    parts: Iterable[tuple[tuple[int, ...], int, int]],
    number: Callable[[Any], Any] = numbers_of,
) -> dict[int, Counter[int]]:
    """How often each example was seen in each epoch of (topology, first step, last step) parts.

    Every worker of every part makes its own dataset, as a new process does.
    """
    seen: dict[int, Counter[int]] = {}
    for topology, start, stop in parts:
        for worker in range(len(topology)):
            part = counted_by_worker(make(), topology, worker, range(start, stop), number)
            for epoch, numbers in part.items():
                seen.setdefault(epoch, Counter()).update(numbers)
    return seen


def once(seen: dict[int, Counter[int]], examples: int, epochs: int) -> bool:
    """Whether each of these epochs holds every example exactly once."""
    return all(seen.get(epoch) == Counter(range(examples)) for epoch in range(epochs))


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )
