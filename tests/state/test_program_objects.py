"""Objects of a program: what their classes, their slots and their factories hold comes back, too."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import StateError, UnsupportedLeafError


@dataclass
class Progress:
    best: float = 9.0
    seen: list[int] = field(default_factory=list)

    @cached_property
    def shown(self) -> str:
        return f"{self.best}"


def test_a_dataclass_is_restored_in_place() -> None:
    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"progress": (progress := Progress())})
        progress.best, progress.seen = 2.0, [1, 2]
        manager.save(1, {"progress": progress})
    fresh = Progress()
    assert fresh.shown == "9.0"
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"progress": fresh})
    assert state["progress"] is fresh
    assert (fresh.best, fresh.seen, fresh.shown) == (2.0, [1, 2], "2.0")


def test_dataclasses_that_become_one_object_stay_one() -> None:
    where, state = MemoryStorage(), {"population": [Progress(), Progress()]}
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize(state)
        state["population"][1] = state["population"][0]
        state["population"][0].best = 1.0
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        restored, _ = manager.restore_or_initialize({"population": [Progress(), Progress()]})
    first, second = restored["population"]
    assert first is second
    assert first.best == 1.0


class Base:
    count = 0
    losses: list[float] = []  # noqa: RUF012 (that it is one for all is what is tried)
    by_name: dict[Any, int] = {}  # noqa: RUF012
    visited: set[Any] = set()  # noqa: RUF012
    total = np.zeros(2)
    LAYERS = (1, 2)


class Agent(Base):
    def __init__(self) -> None:
        self.rate = 1.0


def reset_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would have them."""
    for name, value in {"count": 0, "losses": [], "by_name": {}, "visited": set()}.items():
        monkeypatch.setattr(Base, name, value)
    monkeypatch.setattr(Base, "total", np.zeros(2))


def train(where: MemoryStorage, stop: int) -> tuple[Any, ...]:
    agent = Agent()
    with CheckpointManager(where, recipe={}) as manager:
        _, start = manager.restore_or_initialize({"agents": [agent, {"inner": Agent()}]})
        state = {"agents": [agent, {"inner": Agent()}]}
        for step in range(start, stop):
            Base.count += 1
            agent.losses.append(step / 3)
            agent.by_name[step, "x"] = step
            agent.visited.add((step, 1))
            Base.total += step
            agent.rate *= 0.9
            manager.save(step + 1, state)
    held = (
        Base.count,
        list(Base.losses),
        dict(Base.by_name),
        set(Base.visited),
        Base.total.tobytes(),
    )
    return agent.rate, *held


def test_what_a_run_changes_in_a_class_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_classes(monkeypatch)
    whole = train(MemoryStorage(), 6)
    reset_classes(monkeypatch)
    train(where := MemoryStorage(), 3)
    reset_classes(monkeypatch)
    assert train(where, 6) == whole
    assert train(MemoryStorage(), 1)[1] == 7  # control: the class itself goes on in one process


class Slots:
    __slots__ = ("n", "seen")

    def __init__(self) -> None:
        self.n, self.seen = 0, [0]


class WithDict(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.k = 0


@pytest.mark.parametrize("kind", [Slots, WithDict])
def test_slots_are_attributes(kind: type[Any]) -> None:
    where, value = MemoryStorage(), kind()
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"value": value})
        value.n, value.seen = 3, [0, 1]
        manager.save(1, {"value": value})
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"value": (fresh := kind())})
    assert (fresh.n, fresh.seen) == (3, [0, 1])


class Table:
    def __init__(self, factory: Any) -> None:
        self.q = defaultdict(factory)
        self.nested = defaultdict(lambda: defaultdict(factory))


@pytest.mark.parametrize("in_object", [True, False])
def test_a_factory_of_the_program_is_that_of_the_target(in_object: bool) -> None:
    def make() -> tuple[Any, Any]:
        table = Table(lambda: np.zeros(2))
        return table, table if in_object else {"q": table.q, "nested": table.nested}

    def held(state: Any) -> Any:
        return state if in_object else Table.__new__(Table)

    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        table, member = make()
        manager.restore_or_initialize({"table": member})
        table.q[0, "left"] += 1.5
        table.q["plain"] += 1
        table.nested["a"][3] += 2
        manager.save(1, {"table": member})
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"table": make()[1]})
    found = vars(state["table"]) if in_object else state["table"]
    assert found["q"][0, "left"].tolist() == [1.5, 1.5]
    assert found["q"]["plain"].tolist() == [1.0, 1.0]
    assert found["nested"]["a"][3].tolist() == [2.0, 2.0]
    assert found["q"]["new"].tolist() == found["nested"]["b"]["new"].tolist() == [0.0, 0.0]
    assert found["nested"]["a"]["new"].tolist() == [0.0, 0.0]


def test_a_set_of_tuples_is_restored() -> None:
    where, visited = MemoryStorage(), {(1, "a"), (0, (2, None)), 3, "x", (1, 2)}
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"visited": set[Any]()})
        manager.save(1, {"visited": visited})
    with CheckpointManager(where, recipe={}) as manager:
        assert manager.restore_or_initialize({"visited": set()})[0]["visited"] == visited


def best_of(optimizer: Any, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    return {"loss": 9.0, "optimizer": wrap(optimizer.state_dict())}


def test_a_copy_of_the_state_of_an_optimizer_may_be_kept_beside_it() -> None:
    where = MemoryStorage()

    def make() -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        best = best_of(optimizer, copy.deepcopy)
        return {"model": model, "optimizer": optimizer, "best": best}

    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(make())
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        state["best"] = best_of(state["optimizer"], copy.deepcopy)
        kept = copy.deepcopy(state["best"]["optimizer"])
        state["optimizer"].step()
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        found = manager.restore_or_initialize(make())[0]["best"]["optimizer"]
    for number, values in kept["state"].items():
        for name, value in values.items():
            assert torch.equal(found["state"][number][name], value)
    with CheckpointManager(
        MemoryStorage(), recipe={}
    ) as manager:  # control: by itself it is not one
        state = make()
        del state["optimizer"]
        with pytest.raises(UnsupportedLeafError, match="this is the `state_dict\\(\\)`"):
            manager.restore_or_initialize(state)


class Failing:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError(f"no {state}")


def test_a_failed_restore_gives_classes_dataclasses_and_slots_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reset_classes(monkeypatch)
    where = MemoryStorage()

    def make() -> dict[str, Any]:
        return {"agent": Agent(), "progress": Progress(), "slots": WithDict(), "z": Failing()}

    with CheckpointManager(where, recipe={}) as manager:
        state = make()
        manager.restore_or_initialize(state)
        Base.losses.append(1.0)
        Base.count = 5
        state["progress"].best, state["slots"].n = 1.0, 4
        manager.save(1, state)
    reset_classes(monkeypatch)
    fresh = make()
    with CheckpointManager(where, recipe={}) as manager, pytest.raises(StateError, match="Failing"):
        manager.restore_or_initialize(fresh)
    assert (Base.losses, Base.count, fresh["slots"].n) == ([], 0, 0)
    assert fresh["progress"].best == 9.0
