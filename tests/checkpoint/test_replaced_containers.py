"""A program that uses a dict from before a restore, and saves the restored one, gets an error."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, load_checkpoint
from perdure.errors import StateError


class Average:
    """The moving average of most programs: it replaces the arrays of its dict."""

    def __init__(self) -> None:
        self.shadow: dict[str, Any] = {"w": np.zeros(2), "constant": np.ones(1)}

    def update(self, value: float) -> None:
        self.shadow["w"] = 0.5 * self.shadow["w"] + 0.5 * value


@dataclass
class Best:
    loss: float = 9.0
    name: str = "none"
    nested: dict[str, float] = field(default_factory=dict)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    average = Average()
    average.update(4.0)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"ema": average.shadow, "best": Best(loss=1.0), "log": [0.5]})
    return tmp_path


def fresh(average: Average) -> dict[str, Any]:
    return {"ema": average.shadow, "best": Best(), "log": [0.0]}


def test_the_average_of_a_dict_from_before_the_restore_is_not_saved_stale(run: Path) -> None:
    average = Average()
    with CheckpointManager(run, recipe={}) as manager:
        state, step = manager.restore_or_initialize(fresh(average))
        assert manager.save(step + 1, state)  # equal until the program updates its average
        average.update(8.0)
        for _ in range(2):
            with pytest.raises(StateError, match=r"step 3: ema/w: .*into the dict that it gave"):
                manager.save(3, state)
        average.shadow = state["ema"]
        average.update(8.0)
        assert manager.save(3, state)
    assert load_checkpoint(run)["ema"]["w"].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("path", ["best/loss", "log/0", "best"])
def test_numbers_lists_and_whole_members_are_watched_too(run: Path, path: str) -> None:
    best, log = Best(), [0.0]
    given: dict[str, Any] = {"best": best, "log": log}
    with CheckpointManager(run, recipe={}) as manager:
        state, _ = manager.restore(1, leaves=["best", "log"], like=given)
        if path == "best/loss":
            best.loss = 0.5
        elif path == "log/0":
            log[0] = 3.0
        else:
            given["best"] = Best(loss=0.25)
        with pytest.raises(StateError, match=f"{path}: the program has put a new value"):
            manager.save(2, state)


def goes_on_with_the_restored(average: Average, state: dict[str, Any]) -> dict[str, Any]:
    average.shadow = state["ema"]
    return state


def gives_its_own_to_every_save(average: Average, state: dict[str, Any]) -> dict[str, Any]:
    average.shadow.update(state["ema"])
    return {**state, "ema": average.shadow}


def copies_into_the_restored(average: Average, state: dict[str, Any]) -> dict[str, Any]:
    average.shadow["w"] = state["ema"]["w"] * 1.0
    return state


def moves_on_elsewhere(average: Average, state: dict[str, Any]) -> dict[str, Any]:
    average.shadow["w"] = np.full(2, 7.0)  # used for something else
    state["ema"] = {name: value + 1 for name, value in state["ema"].items()}
    return state


@pytest.mark.parametrize(
    "use",
    [
        goes_on_with_the_restored,
        gives_its_own_to_every_save,
        copies_into_the_restored,
        moves_on_elsewhere,
    ],
)
def test_a_program_that_saves_what_it_uses_is_left_alone(run: Path, use: Any) -> None:
    average = Average()
    with CheckpointManager(run, recipe={}) as manager:
        state, step = manager.restore_or_initialize(fresh(average))
        state = use(average, state)
        for later in (1, 2):
            if use is not copies_into_the_restored and use is not moves_on_elsewhere:
                average.update(8.0)
            assert manager.save(step + later, state)


def test_a_dict_that_only_the_target_refers_to_is_not_kept(run: Path) -> None:
    average = Average()
    target = fresh(average)
    only_here = weakref.ref(target["ema"]["constant"])
    held = weakref.ref(target["ema"]["w"])
    shadow = average.shadow
    with CheckpointManager(run, recipe={}) as manager:
        target["copy"] = shadow
        del target["copy"], average
        state, step = manager.restore_or_initialize(target)
        del target
        assert held() is not None  # `shadow` is watched
        del shadow
        assert manager.save(step + 1, state)
        assert held() is None
        assert only_here() is None
