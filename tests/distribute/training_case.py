"""What the worker programs of these tests train on: the sizes, and one dataset."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.data import ArrayDataset

REPLICAS = 8
BATCH = 4 * REPLICAS
# Training starts in the middle of an epoch.
FIRST = 2
STEPS = 3


def dataset(batch: int = BATCH, kind: type[ArrayDataset] = ArrayDataset) -> Any:
    """Images of noise. The last of the 5 batches of an epoch is padded, and is trained on."""
    rng = np.random.default_rng(7)
    x = rng.integers(0, 256, (4 * batch + 9, 28, 28), dtype=np.uint8)
    return kind({"x": x, "y": rng.integers(0, 10, len(x))}, batch, seed=3)


class Strided(ArrayDataset):
    """A negative control: gives the rows of a batch to the devices in turn."""

    devices = 1

    def indices(self, step: int) -> Any:
        """Rows 0, D, 2D, ... first."""
        index, weight = super().indices(step)
        order = np.argsort(np.arange(len(index)) % self.devices, kind="stable")
        return index[order], weight[order]


def strided(devices: int, batch: int = BATCH) -> Strided:
    """The dataset with its rows given to the devices in turn."""
    data = dataset(batch, Strided)
    data.devices = devices
    return data
