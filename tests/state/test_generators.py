"""Random generators are leaves, restored in place and to the bit, cached numbers included."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import MismatchError, UnsupportedLeafError
from perdure.state import flatten, restore

KINDS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def drawn(value: Any) -> list[Any]:
    """Draws that leave a cached number in the generator."""
    if isinstance(value, random.Random):
        return [value.gauss(0, 1), value.random(), value.sample(range(99), 3)]
    if isinstance(value, np.random.RandomState):
        return [value.randn(), value.rand(), value.randint(0, 9, 3, np.int8).tolist()]
    if isinstance(value, np.random.BitGenerator):
        return [int(value.random_raw())]
    half = value.integers(0, 9, dtype=np.int32)  # uses one half of a word and keeps the other
    return [int(half), value.standard_normal(), value.spawn(1)[0].random()]


MADE: dict[str, Callable[[int], Any]] = {
    "random.Random": random.Random,
    "RandomState": np.random.RandomState,
    "a spawned generator": lambda seed: np.random.default_rng([3, seed]).spawn(2)[1],
    "seeded by the system": lambda _: np.random.default_rng(),
    **{kind: lambda seed, kind=kind: np.random.Generator(bits(kind, seed)) for kind in KINDS},
    **{f"bits of {kind}": lambda seed, kind=kind: bits(kind, seed) for kind in KINDS},
}


def bits(kind: str, seed: int) -> Any:
    return getattr(np.random, kind)(seed)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_generator_continues_where_it_was(tmp_path: Path, name: str, before: int) -> None:
    value = MADE[name](1)
    for _ in range(before):
        drawn(value)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"generator": value})
        expected = [drawn(value) for _ in range(3)]
        again = MADE[name](2)
        drawn(again)
        restored = manager.restore(like={"generator": again}).state["generator"]
    assert restored is again, "in place"
    assert [drawn(again) for _ in range(3)] == expected


def test_a_generator_of_another_type_is_refused() -> None:
    leaves = flatten({"rng": np.random.Generator(np.random.SFC64(1))})
    with pytest.raises(MismatchError, match="rng/state"):
        restore({"rng": np.random.Generator(np.random.Philox(1))}, leaves)


class Counting(random.Random):
    """A subclass with an attribute that the base class does not save."""

    calls = 0

    def random(self) -> float:
        self.calls += 1
        return super().random()


def test_a_generator_that_cannot_be_restored_exactly_is_refused() -> None:
    counting = Counting(1)
    counting.random()
    for value in (random.SystemRandom(), counting):
        with pytest.raises(UnsupportedLeafError, match=r"rng: .*no state that can be restored"):
            flatten({"rng": value})


def test_a_seed_sequence_spawns_what_it_would_have_spawned() -> None:
    def fresh() -> dict[str, Any]:
        seed = np.random.SeedSequence(3)
        return {
            "seed": seed,
            "again": seed,
            "words": np.random.SeedSequence([1, 2], spawn_key=(4,)),
        }

    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize(fresh())
        state["seed"].spawn(2)
        state["words"] = state["words"].spawn(3)[1]
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        restored, _ = manager.restore_or_initialize(fresh())
    assert restored["again"] is restored["seed"]
    for name in ("seed", "words"):
        one, other = (each[name].spawn(2)[1] for each in (state, restored))
        assert one.generate_state(9).tolist() == other.generate_state(9).tolist()
