"""The random generators that a process shares: where `fit` takes the order of the examples from.

On JAX arrays are shuffled by NumPy's, on PyTorch by torch's, a `PyDataset` by Python's. Restoring them
restores the order, and with it whatever a dataset or a callback draws from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from perdure.state.keras_state import read, write


def state(generators: Sequence[Any] = ()) -> dict[str, Any]:
    """All of them as plain values; `generators` are those of PyTorch that a data loader owns."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, np.array(words, np.uint64), gauss],
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (it is the one that Keras draws from)
    }
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().numpy().copy()
        found["generators"] = [each.get_state().numpy().copy() for each in generators]
    # Layers and functions without a seed of their own draw from this one.
    shared = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if shared is not None:
        found["keras"] = np.array(read(shared.state))
    return found


def restore(found: dict[str, Any], generators: Sequence[Any] = ()) -> None:
    """Put all of them back."""
    if "keras" in found:
        own = {"": seed_generator.global_seed_generator().state}
        write(own, {"": found["keras"]})
    version, words, gauss = found["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(found["numpy"])  # noqa: NPY002
    if "torch" in found and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.from_numpy(found["torch"].copy()))
        for each, words in zip(generators, found["generators"], strict=True):
            each.set_state(torch.from_numpy(words.copy()))
