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


def counted(
    make: Callable[[], Any],
    parts: Iterable[tuple[tuple[int, ...], int, int]],
    number: Callable[[Any], Any] = lambda batch: batch["n"],
) -> dict[int, Counter[int]]:
    """How often each example was seen in each epoch of (topology, first step, last step) parts.

    Every worker of every part makes its own dataset, as a new process does.
    """
    seen: dict[int, Counter[int]] = {}
    for topology, start, stop in parts:
        for ranges in split(REPLICAS, topology):
            data = make()
            for step in range(start, stop):
                epoch = data.epoch(step)[0]
                for first, last in ranges:
                    for replica in range(first, last):
                        batch = data.batch(step, replica, REPLICAS)
                        weight = batch["weight"]
                        numbers = np.asarray(number(batch))[weight == 1]
                        seen.setdefault(epoch, Counter()).update(numbers.tolist())
            if hasattr(data, "close"):
                data.close()
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
