"""The check of a first step for `perdure doctor`: what it computes, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_engine import NumpyEngine

from perdure.data import ArrayDataset
from perdure.distribute import Strategy, step


def grad(state: Any, batch: Any, key: Any) -> Any:
    return {"x": batch["x"].sum()}


def update(state: Any, total: Any) -> Any:
    total["x"] *= 2
    return state, dict(total)


def first_step(state: dict[str, Any], devices: int) -> Counter[str]:
    """Train one step; returns how often each verb of the engine was called."""
    engine = NumpyEngine(devices)
    strategy = Strategy(engine, 2)
    dataset = ArrayDataset({"x": np.ones(8, np.float32)}, batch_size=8)
    strategy.step(grad, update)(state, strategy.batch(dataset, 0))
    return Counter(name for name, _ in engine.calls)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the check of a first step finds; here the program is not ended by it."""
    found: list[dict[str, Any]] = []
    hook = SimpleNamespace(is_doctor=True, checked_step=found.extend)
    monkeypatch.setattr(step, "drill_hook", lambda: hook)
    return found


def test_outside_of_the_doctor_nothing_is_computed_twice() -> None:
    assert first_step({"w": np.ones(2)}, 2) == {"grad": 2, "add": 1, "update": 2}


def test_the_doctor_gets_every_repetition(results: list[dict[str, Any]]) -> None:
    calls = first_step({"w": np.ones(2)}, 2)
    # After the check the step itself: 2 contributions, their sum, an update on each device.
    assert calls == {"grad": 2 * 3 + 2, "add": 1 + 1, "update": 2 * 2 + 2}
    seen = {(row["what"], row["leaves"]["contribution/x"]) for row in results[:6]}
    assert len(seen) == 2
    assert len({row["leaves"]["logs/x"] for row in results if row["what"] == "update"}) == 1


def test_a_state_without_an_exact_form_is_a_row(results: list[dict[str, Any]]) -> None:
    first_step({"odd": object()}, 1)
    (row,) = [row for row in results if "problem" in row]
    assert (row["what"], "odd" in row["problem"]) == ("update", True)
