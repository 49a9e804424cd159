"""NumPy arrays come back in the memory order that they had: the order of additions depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, MemoryStorage

State = dict[str, Any]
SHAPE = (40, 50, 3)


class Memory:
    """An object of the program with a `state_dict`."""

    def __init__(self) -> None:
        self.last: Any = None

    def state_dict(self) -> State:
        return {"last": self.last}

    def load_state_dict(self, state: State) -> None:
        self.last = state["last"]


def fresh() -> State:
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    columns = np.asfortranarray(np.zeros((2, 2)))
    empty: State = {"none": None, "list": [], "memory": Memory(), "dict": {}, "columns": columns}
    return {**empty, "rows": values, "scalar": np.float64(1), "sum": 0.0}


def change(state: State, step: int) -> None:
    turned = np.roll(state["rows"].transpose(2, 0, 1), step)
    state["rows"] = np.asfortranarray(state["rows"]) if step == 2 else state["rows"]
    state["none"], state["memory"].last = np.asfortranarray(turned), turned.T.copy("K")
    state["list"].append(state["rows"].transpose(1, 2, 0).copy("K"))
    state["dict"][f"a{step}"] = turned[:, ::-1].copy("K")
    state["columns"] = np.ascontiguousarray(state["columns"] + step)
    arrays = [state["rows"], state["none"], state["memory"].last, *state["list"]]
    state["sum"] += sum(float(each.sum(dtype=np.float32)) for each in arrays)


def run(where: MemoryStorage, stop: int) -> State:
    with CheckpointManager(where, recipe={}) as manager:
        state, start = manager.restore_or_initialize(fresh())
        for step in range(start, stop):
            change(state, step + 1)
            manager.save(step + 1, state)
    return state


def strides(state: State) -> list[Any]:
    names = ("rows", "none", "columns")
    return [state[n].strides for n in names] + [each.strides for each in state["list"]]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_arrays_keep_their_memory_order(stop: int) -> None:
    whole = run(MemoryStorage(), 5)
    run(where := MemoryStorage(), stop)
    again = run(where, 5)
    assert again["sum"] == whole["sum"]
    assert strides(again) == strides(whole)
    assert again["memory"].last.strides == whole["memory"].last.strides


def test_the_order_decides_the_bits() -> None:
    """Negative control: a sum in the other order has other bits."""
    rows = np.random.default_rng(1).normal(size=(300, 400)).astype(np.float32)
    assert rows.sum() != np.asfortranarray(rows).sum()
