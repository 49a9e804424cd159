"""Processes add the contributions of one step and of one structure, or all raise what differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_engine import NumpyEngine
from test_processes import together
from test_same_start import Member

from perdure.data import ArrayDataset
from perdure.distribute import Strategy
from perdure.distribute.reduction import Agreement
from perdure.errors import StateError

V, CALLS, ODD = 6, 4, 2
DATA = ArrayDataset(np.random.default_rng(0).normal(size=(8 * V, 3)), 2 * V)


class Corrupt(Exception):
    """What a program raises for a bad example."""


ANY = (StateError, Corrupt)


def train(engine: Any, act: str = "", allowed: tuple[Any, ...] = ()) -> list[bytes]:
    """The totals of some steps; at step ODD process 1 does something else, or all do ("all ...")."""
    strategy = Strategy(engine, V)
    is_odd = engine.processes.index == 1 or act.startswith("all ")
    step = 0

    def grad(state: Any, batch: Any, key: Any) -> Any:
        value = (batch[0] * state["w"]).sum(0)
        if step == ODD and is_odd and act.endswith("fail"):
            raise Corrupt("a bad example")
        if step == ODD and is_odd and act.endswith("other name"):
            return {"y": value}
        if step == ODD and is_odd and act.endswith("larger"):
            return {"x": value, "y": np.ones(10)}
        return {"x": value}

    def update(state: Any, total: Any) -> tuple[Any, Any]:
        if step == ODD and is_odd and act.endswith("update"):
            raise Corrupt("no memory")
        return state, total

    functions = [strategy.step(grad, update) for _ in range(2 if act == "order" else 1)]
    state: Any = {"w": np.ones(3)}
    totals: list[bytes] = []
    while len(totals) < CALLS:
        if not (step == ODD and is_odd and act.endswith("skip")):
            order = functions[::-1] if step == ODD and is_odd else functions
            try:
                made = [train_step(state, strategy.batch(DATA, step))[1] for train_step in order]
                totals.append(b"".join(leaf.tobytes() for leaf in made[-1].values()))
            except allowed:
                totals.append(b"failed")
        step += 1
    return totals


def outcomes(act: str, **options: Any) -> list[Any]:
    def run(processes: Any) -> Any:
        try:
            return train(Member(processes, {}), act, **options)
        except (StateError, Corrupt) as error:
            return str(error)

    return together(3, run)[0]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("fail", f"process 1 failed in step {ODD} of training function 1, which has made {ODD} "),
        ("skip", f"at step {ODD + 1}"),
        ("other name", "gives another structure than process"),
        ("larger", "y: "),
        ("update", f"which has made {ODD} updates"),
        ("order", f"step {ODD} of training function 2"),
    ],
)
def test_a_process_that_does_something_else_is_noticed_by_all(act: str, text: str) -> None:
    found = outcomes(act, allowed=(Corrupt,) if act == "update" else ())
    if act == "fail":
        assert found.pop(1) == "a bad example", "the process itself has its own error"
    assert all(text in error for error in found), found


def test_a_failure_that_all_catch_leaves_the_step_out_in_all() -> None:
    expected = train(NumpyEngine(1), "all fail", ANY)
    assert expected[ODD] == b"failed"
    assert outcomes("fail", allowed=ANY) == [expected] * 3


@pytest.mark.parametrize("act", ["", "all fail", "all skip", "all other name", "all larger"])
def test_what_all_processes_do_alike_has_the_bits_of_one(act: str) -> None:
    assert outcomes(act, allowed=ANY) == [train(NumpyEngine(1), act, ANY)] * 3


def test_without_the_comparison_contributions_of_two_steps_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Agreement._sum
    monkeypatch.setattr(Agreement, "_sum", lambda *given: (True, real(*given)[1]))
    found, expected = outcomes("skip"), train(NumpyEngine(1))
    assert found[0][:ODD] == expected[:ODD]
    assert found[0][ODD] == found[1][ODD] != expected[ODD]
