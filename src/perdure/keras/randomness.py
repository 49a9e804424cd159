"""The random generators that a process shares: where `fit` takes the order of the examples from.

On JAX arrays are shuffled by NumPy's, on PyTorch by torch's, a `PyDataset` by Python's. Restoring them
restores the order, and with it whatever a dataset or a callback draws from them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from perdure.errors import TrainError
from perdure.state import process_random


def state(generators: Sequence[Any] = ()) -> dict[str, Any]:
    """All of them as plain values; `generators` are those of PyTorch that a data loader owns."""
    shared = process_random.encode(process_random.capture())
    return {
        "shared": {name: np.frombuffer(data, np.uint8) for name, data in shared.items()},
        "generators": [each.get_state().numpy().copy() for each in generators],
    }


def restore(found: dict[str, Any], generators: Sequence[Any] = ()) -> None:
    """Put all of them back."""
    if "shared" not in found:
        raise TrainError(
            "BackupAndRestore: this backup was made by an earlier release of perdure, whose random "
            "generators this one does not read. Finish the run with that release, or start again."
        )
    for name, data in found["shared"].items():
        process_random.restore_generator(name, bytes(data))
    if generators:
        torch = sys.modules["torch"]
        for each, words in zip(generators, found["generators"], strict=True):
            each.set_state(torch.from_numpy(words.copy()))
