"""The random generators of this process as what a plug-in keeps in the checkpoint of its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perdure.checkpoint.caller_warning import warn_caller
from perdure.state.process_random import capture, encode, restore_all


def generator_states() -> dict[str, bytes]:
    """The present state of each generator, by its name."""
    return encode(capture())


def restore_generators(states: Mapping[str, bytes]) -> None:
    """Restore generators; warns about each that cannot be restored."""
    for note in restore_all(states):
        warn_caller(note)


def states_to_arrays(states: Mapping[str, bytes]) -> dict[str, np.ndarray[Any, Any]]:
    """The states of generators as a member of a checkpoint."""
    return {name: np.frombuffer(data, np.uint8) for name, data in states.items()}


def states_from_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    """The inverse of `states_to_arrays`."""
    return {name: array.tobytes() for name, array in arrays.items()}
