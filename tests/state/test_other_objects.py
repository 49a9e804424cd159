"""A run that puts other objects into its state than the target has is refused, and not mixed up."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import StateError, UnsupportedLeafError


def test_one_object_of_the_target_that_becomes_two_is_refused() -> None:
    class Local:  # of which a restore can make none
        n = 0

    one = Local()
    state = {"a": one, "best": one}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        manager.save(1, state)
        state["best"] = Local()
        with pytest.raises(UnsupportedLeafError, match="another object than a"):
            manager.save(2, state)


def test_two_objects_of_the_target_that_become_one_are_refused() -> None:
    state = {
        "a": SimpleNamespace(n=0),
        "b": np.random.default_rng(0),
        "c": np.random.default_rng(1),
    }
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        manager.save(1, state)
        state["c"] = state["b"]
        with pytest.raises(UnsupportedLeafError, match="one object with b"):
            manager.save(2, state)


def test_objects_that_change_places_in_a_list_are_no_others() -> None:
    state: Any = {"pool": [SimpleNamespace(n=n) for n in range(3)]}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        state["pool"].reverse()
        manager.save(1, state)
        state["pool"].append(SimpleNamespace(n=3))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Transition:
    seen: Any
    kind: str = dataclasses.field(default="env", metadata={"static": True})


def test_a_record_with_a_static_field_in_a_list_that_grew_is_refused() -> None:
    state: Any = {"buffer": []}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        state["buffer"].append(Transition(np.ones(2)))
        with pytest.raises(StateError):
            manager.save(1, state)
        assert manager.all_steps() == []
