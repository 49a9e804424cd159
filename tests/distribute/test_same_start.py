"""A group starts with one recipe and one state, or every process raises what differs, and where."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from numpy_engine import NumpyEngine
from test_processes import together

from perdure.data import ArrayDataset
from perdure.distribute import Strategy
from perdure.errors import RecipeMismatchError, StateError

V = 4


class Member(NumpyEngine):
    """One process of a group, as a thread; partial sums are sent as bytes."""

    def __init__(self, processes: Any, recipe: dict[str, Any]) -> None:
        super().__init__(1)
        self.processes = processes
        self.devices_per_process = (1,) * processes.count
        self._recipe = recipe

    def recipe(self) -> dict[str, Any]:
        return {"engine": "numpy", **self._recipe}

    def exchange(self, roots: list[Any], counts: tuple[int, ...], merge: Any = None) -> Any:
        parts = self.processes.gather(pickle.dumps(roots))
        nested = [pickle.loads(part) for part in parts]
        return nested if merge is None else merge(nested)


def outcomes(count: int, program: Any) -> list[Any]:
    def run(processes: Any) -> Any:
        try:
            return program(processes)
        except (RecipeMismatchError, StateError) as error:
            return error

    return together(count, run)[0]


def texts(errors: list[Any], kind: type[Exception]) -> str:
    """The one text that all processes raised."""
    assert {type(error) for error in errors} == {kind}, errors
    (text,) = {str(error) for error in errors}
    return text


@pytest.mark.parametrize(
    ("field", "replicas", "seed", "threads"),
    [("replicas", 8, 0, 1), ("seed", V, 5, 1), ("threads", V, 0, 2)],
)
def test_a_worker_with_another_recipe_is_refused(
    field: str, replicas: int, seed: int, threads: int
) -> None:
    def program(processes: Any) -> None:
        odd = processes.index == 1
        engine = Member(processes, {"threads": threads if odd else 1})
        Strategy(engine, replicas if odd else V, seed=seed if odd else 0)

    text = texts(outcomes(3, program), RecipeMismatchError)
    mine, other = {"replicas": (V, 8), "seed": (0, 5), "threads": (1, 2)}[field]
    (line,) = [line for line in text.splitlines() if line.startswith("  ")]
    assert line.startswith(f"  {field}: process 0 (")
    assert f"has {mine}, process 1 (" in line
    assert f"has {other}" in line


def test_a_difference_of_recipes_may_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_ALLOW", "threads")

    def program(processes: Any) -> int:
        return Strategy(Member(processes, {"threads": processes.index}), V).num_replicas_in_sync

    with pytest.warns(UserWarning, match="do not have one recipe") as caught:
        assert outcomes(2, program) == [V, V]
    assert len(caught) == 1, "only the chief warns"


def grad(state: Any, batch: Any, key: Any) -> Any:
    return {"x": (batch[0] * state["layer"]["w"]).sum(0)}


def step_from(weights: dict[int, float], again: bool = False) -> Any:
    def program(processes: Any) -> Any:
        strategy = Strategy(Member(processes, {}), V)
        data = ArrayDataset(np.random.default_rng(0).normal(size=(40, 3)), 2 * V)
        train_step = strategy.step(
            grad, lambda s, total: ({"layer": {"w": s["layer"]["w"]}}, total)
        )
        local_state = {"layer": {"w": np.full(3, weights.get(processes.index, 1.0))}}
        state = {"layer": {"w": np.ones(3)}} if again else local_state
        state, total = train_step(state, strategy.batch(data, 0))
        if again:
            total = train_step(local_state, strategy.batch(data, 1))[1]
        return total["x"].tobytes()

    return program


def test_states_that_differ_at_the_first_step_name_leaf_and_process() -> None:
    text = texts(outcomes(3, step_from({2: np.nextafter(1.0, 2)})), StateError)
    assert "layer/w: process 2 holds other bits than process 0" in text
    assert "process 1" not in text
    assert "give them one seed, and restore in all of them" in text


def test_states_are_compared_at_the_first_step_only() -> None:
    assert len(set(outcomes(3, step_from({})))) == 1
    # Negative control: at the second step, which is not compared, nothing notices the difference.
    assert all(isinstance(total, bytes) for total in outcomes(2, step_from({1: 2.0}, again=True)))
