"""Saves and restores the random generators of the process, which `fit` draws the order of data from.

Arrays are shuffled by NumPy's generator on JAX and by torch's on PyTorch, a `PyDataset` by Python's.
Restoring them restores the order, and whatever a dataset or a callback draws from them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from perdure.errors import TrainError
from perdure.state import process_random


def state(generators: Sequence[Any] = ()) -> dict[str, Any]:
    """All generators as plain values; `generators` are those that a torch DataLoader owns."""
    shared = process_random.encode(process_random.capture())
    return {
        "shared": {name: np.frombuffer(data, np.uint8) for name, data in shared.items()},
        "generators": [generator.get_state().numpy().copy() for generator in generators],
    }


def restore(saved: dict[str, Any], generators: Sequence[Any] = ()) -> None:
    """Restore all generators."""
    if "shared" not in saved:
        raise TrainError(
            "BackupAndRestore: this backup was made by an earlier release of perdure, whose random "
            "generators this one does not read. Finish the run with that release, or start it again."
        )
    for name, data in saved["shared"].items():
        process_random.restore_generator(name, bytes(data))
    if generators:
        torch = sys.modules["torch"]
        for generator, words in zip(generators, saved["generators"], strict=True):
            generator.set_state(torch.from_numpy(words.copy()))
