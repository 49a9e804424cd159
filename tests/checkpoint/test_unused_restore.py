"""A program that ignores the state that a restore returns gets an error at its next save."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perdure
from perdure import CheckpointManager
from perdure.errors import StateError

State = dict[str, Any]


class Counter:
    """An object, which is restored in place."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> State:
        return {"n": self.n}

    def load_state_dict(self, state: State) -> None:
        self.n = state["n"]


def fresh(k: int = 0) -> State:
    return {
        "model": Counter(k),
        "epoch": k,
        "deep": {"w": np.full(2, float(k)), "list": [k, (k, "text")]},
        "constant": [7, np.ones(2)],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(4, fresh(4))
    return tmp_path


STALE: dict[str, tuple[Callable[[State], Any], str]] = {
    "all": (lambda state: state, "epoch"),
    "part": (lambda state: {"new": state["deep"]}, "new/w"),
    "array in another dict": (lambda state: {"w": state["deep"]["w"]}, "w"),
    "list": (lambda state: {"list": state["deep"]["list"]}, "list/0"),
    "number": (lambda state: {"epoch": state}, "epoch/epoch"),
}


@pytest.mark.parametrize("case", STALE)
@pytest.mark.parametrize("call", ["initialize", "step", "like"])
def test_the_target_is_not_saved_in_place_of_what_was_restored(
    run: Path, case: str, call: str
) -> None:
    state, part = fresh(), STALE[case]
    with CheckpointManager(run, recipe={}) as manager:
        if call == "initialize":
            manager.restore_or_initialize(state)
        elif call == "step":
            assert manager.restore_or_initialize(state).step == 4
        else:
            assert manager.restore(like=state)[1] == 4
        state["deep"]["w"] += 1
        state["epoch"] += 1
        for _ in range(2):  # a program that catches the error does not get past it
            with pytest.raises(StateError, match=rf"step 5: {part[1]}: .*state, step = manager"):
                manager.save(5, part[0](state))
        manager.restore_or_initialize(state)
        with pytest.raises(StateError, match=part[1]):
            manager.save_and_exit(5, part[0](state))
        assert manager.all_steps() == [4]


def test_a_counter_that_began_again_may_have_reached_the_restored_number(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(8, {"model": Counter(4), "epoch": 4})
        manager.wait_until_finished()
        state = {"model": Counter(0), "epoch": 0}
        manager.restore_or_initialize(state)
        state["epoch"] += 4
        with pytest.raises(StateError, match="epoch: the restore returned"):
            manager.save(16, state)


def takes(state: State, manager: CheckpointManager) -> State:
    return manager.restore_or_initialize(state).state


def updates(state: State, manager: CheckpointManager) -> State:
    restored, _ = manager.restore_or_initialize(state)
    state.update(restored)
    return state


def copies(state: State, manager: CheckpointManager) -> State:
    restored = manager.restore_or_initialize(state)[0]
    state["epoch"] = restored["epoch"]
    state["deep"]["w"][:] = restored["deep"]["w"]
    state["deep"]["list"] = restored["deep"]["list"]
    return state


def has_only_objects(state: State, manager: CheckpointManager) -> State:
    state = {"model": state["model"], "constant": state["constant"]}
    manager.restore(like=state, leaves=["model", "constant"])
    return state


def counts_by_the_step(state: State, manager: CheckpointManager) -> State:
    state = {"model": state["model"], "epoch": 0}
    state["epoch"] = 1 + manager.restore(like=state, leaves=["model", "epoch"]).step
    return state


def makes_its_own(state: State, manager: CheckpointManager) -> State:
    manager.restore_or_initialize(state)
    return {**fresh(9), "constant": state["constant"]}


def is_changed_in_place(state: State, manager: CheckpointManager) -> State:
    members = perdure.Checkpoint(**state)
    state = {"all": members}
    with CheckpointManager(Path(manager.directory, "other"), recipe={}) as other:
        other.save(1, {"all": perdure.Checkpoint(**fresh(4))})
        other.wait_until_finished()
        other.restore(like=state)
        vars(members)["epoch"] += 1
        assert vars(members)["epoch"] == 5
        other.save(2, state)
    return fresh(5)


@pytest.mark.filterwarnings("ignore:.*restored step 4 only in part")
@pytest.mark.parametrize(
    "use",
    [
        takes,
        updates,
        copies,
        has_only_objects,
        counts_by_the_step,
        makes_its_own,
        is_changed_in_place,
    ],
)
def test_a_program_that_uses_what_was_restored_is_left_alone(run: Path, use: Any) -> None:
    with CheckpointManager(run, recipe={}) as manager:
        state = use(fresh(), manager)
        if "deep" in state:
            state["deep"]["w"] += 1
        manager.save(5, state)
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 5]


def test_a_look_at_an_older_step_beside_the_training_is_no_reason_for_an_error(run: Path) -> None:
    with CheckpointManager(run, recipe={}, max_to_keep=None) as manager:
        state, step = manager.restore_or_initialize(fresh())
        assert manager.save(step + 1, state)
        best = manager.restore(4, like=state).state
        assert best["epoch"] == 4
        state["epoch"] += 1
        assert manager.save(step + 2, state)


def test_the_target_is_kept_alive_only_until_the_state_is_taken(run: Path) -> None:
    with CheckpointManager(run, recipe={}) as manager:
        target = fresh()
        gone = weakref.ref(target["deep"]["w"])
        restored = manager.restore_or_initialize(target)
        del target
        assert restored.step == 4
        assert gone() is not None
        assert pickle.loads(pickle.dumps(restored)).step == 4
        gc.collect()
        assert gone() is None


class Average:
    """The moving average of most programs: it replaces the arrays of its dict."""

    def __init__(self) -> None:
        self.shadow: State = {"w": np.zeros(2)}

    def update(self) -> None:
        self.shadow["w"] = 0.5 * self.shadow["w"] + 0.5


@pytest.mark.parametrize("is_rebound", [False, True])
def test_an_average_that_keeps_the_dict_from_before_the_restore_is_named(
    tmp_path: Path, is_rebound: bool
) -> None:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"ema": {"w": np.ones(2)}})
    average = Average()
    with (
        CheckpointManager(tmp_path, recipe={}) as manager,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        state, _ = manager.restore_or_initialize({"ema": average.shadow})
        if is_rebound:
            average.shadow = state["ema"]
        for step in range(2, 6):
            average.update()
            manager.save(step, state)
    named = [str(line.message) for line in caught if "average.shadow" in str(line.message)]
    assert len(named) == (not is_rebound)
    assert all("ema: the program has changed" in text for text in named)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_list_of_modules_under_its_old_name_is_no_reason_for_a_warning(
    tmp_path: Path, depth: int
) -> None:
    for steps in (range(1, 3), range(3, 7)):
        layers = [torch.nn.Linear(2, 2) for _ in range(2)]
        models = [{"net": layer} for layer in layers] if depth else layers
        with CheckpointManager(tmp_path, recipe={}) as manager:
            state, _ = manager.restore_or_initialize({"models": models})
            for step in steps:
                with torch.no_grad():
                    layers[0].weight += 1
                manager.save(step, state)
