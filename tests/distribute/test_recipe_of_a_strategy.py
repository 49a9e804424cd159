"""A manager without the recipe of the strategy that computes its state warns, on both engines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from numpy_engine import NumpyEngine

import perdure
from perdure.distribute import Strategy

NOT_GIVEN = "a strategy computes in this program, and the manager was not given its recipe"


def strategy(engine: str, replicas: int = 2) -> Any:
    if engine == "jax":
        from perdure.jax import MirroredStrategy
    elif engine == "torch":
        from perdure.torch import MirroredStrategy
    else:
        return Strategy(NumpyEngine(1), replicas)
    return MirroredStrategy(replicas=replicas)


def warnings_of(directory: Path, recipe: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with perdure.CheckpointManager(directory, recipe=recipe) as manager:
            state, step = manager.restore_or_initialize({"x": 1.0})
            manager.save(step + 1, state)
            manager.save(step + 2, state)
    assert all(Path(each.filename) == Path(__file__) for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_manager_without_the_recipe_of_the_strategy_warns_once(
    tmp_path: Path, engine: str
) -> None:
    own = strategy(engine)
    assert warnings_of(tmp_path / "before", None) == [], "a strategy that computes nothing"
    own.step(lambda *_: {}, lambda *_: ({}, {}))
    (warning,) = warnings_of(tmp_path / "without", None)
    assert NOT_GIVEN in warning
    assert f"{tmp_path / 'without'}: " in warning
    assert "recipe=strategy.recipe(dataset)" in warning
    assert warnings_of(tmp_path / "given", own.recipe()) == []
    assert warnings_of(tmp_path / "none", {}) == []
    other = strategy(engine, replicas=4)
    with pytest.raises(perdure.errors.RecipeMismatchError, match="replicas: the checkpoint has 2"):
        warnings_of(tmp_path / "given", other.recipe())


def test_a_strategy_that_runs_functions_counts_and_one_that_is_gone_does_not(
    tmp_path: Path,
) -> None:
    own = strategy("numpy")
    own.run(lambda: 1)
    assert len(warnings_of(tmp_path / "without", None)) == 1
    with perdure.CheckpointManager(tmp_path / "without") as manager:
        manager.restore()  # an evaluation needs no recipe
    del own
    assert warnings_of(tmp_path / "gone", None) == []
