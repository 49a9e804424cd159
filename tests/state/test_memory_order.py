"""Arrays come back in the memory order that they had: the order of additions depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("has_other", [False, True])
def test_an_array_of_another_byte_order_keeps_it(has_other: bool) -> None:
    """Beside a column-major array, too, which lets the checkpoint describe orders."""
    where = MemoryStorage()
    state: State = {"big": np.arange(6, dtype=">f4").reshape(2, 3)}
    if has_other:
        state["columns"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    with CheckpointManager(where, recipe={}) as manager:
        manager.save(1, state)
    fresh = {name: np.zeros_like(value) for name, value in state.items()}
    with CheckpointManager(where, recipe={}) as manager:
        restored, _ = manager.restore_or_initialize(fresh)
    assert restored["big"].dtype == np.dtype(">f4")
    assert restored["big"].tobytes() == state["big"].tobytes()


def test_the_order_decides_the_bits() -> None:
    """Negative control: a sum in the other order has other bits."""
    rows = np.random.default_rng(1).normal(size=(300, 400)).astype(np.float32)
    assert rows.sum() != np.asfortranarray(rows).sum()


class Whitened(torch.nn.Module):
    """Keeps what `torch.linalg` and NumPy return column-major, in each kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.register_buffer("inverse", torch.eye(6))
        self.kept: Any = None
        self.array = np.zeros((3, 4), np.float32)
        self.kernel = torch.nn.Parameter(torch.ones(2, 3, 4, 4))


class Rotated(torch.optim.Optimizer):
    """Keeps the vectors of a decomposition in its state, as SOAP does, and their order in turn."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            vectors = torch.linalg.qr(parameter.detach() + state["count"])[0].mT
            state["vectors"] = vectors.contiguous() if state["count"] == 3 else vectors


def tensors() -> State:
    torch.manual_seed(0)
    model = Whitened()
    made = {"model": model, "own": Rotated([model.linear.weight]), "memory": Memory(), "held": {}}
    return {**made, "adam": torch.optim.Adam(model.parameters()), "plain": torch.zeros(6, 6)}


def change_tensors(state: State, step: int) -> None:
    model, noise = state["model"], torch.arange(36.0).reshape(6, 6).cos() + step
    if step == 2:
        model.kernel.data = model.kernel.data.to(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().cos() * step
    state["adam"].step()
    state["own"].step()
    model.inverse = noise.mT if step != 3 else noise
    model.kept, model.array = (
        torch.linalg.inv(noise + torch.eye(6)),
        np.asfortranarray(model.array + step),
    )
    state["memory"].last, state["plain"] = noise.exp().mT, noise.sin().mT
    state["held"] = {"deep": [noise.mT, noise.tanh().mT[:4]]}


def layouts(state: State) -> list[Any]:
    model, adam, own = (state[name] for name in ("model", "adam", "own"))
    held = [
        *(
            model.inverse,
            model.kept,
            model.kernel,
            model.linear.weight,
            adam.state[model.kernel]["exp_avg"],
        ),
        *(own.state[model.linear.weight]["vectors"], state["memory"].last, state["plain"]),
        *state["held"]["deep"],
    ]
    orders = [sorted(range(t.ndim), key=lambda axis, t=t: -t.stride(axis)) for t in held]
    values = [t.detach().contiguous().numpy().tobytes() for t in held]
    return [orders, values, model.array.strides, model.array.tobytes()]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_tensors_keep_their_memory_order(stop: int) -> None:
    def train(where: MemoryStorage, stop: int) -> State:
        with CheckpointManager(where) as manager:
            state, start = manager.restore_or_initialize(tensors())
            for step in range(start, stop):
                change_tensors(state, step + 1)
                manager.save(step + 1, state)
        return state

    whole = train(MemoryStorage(), 5)
    train(where := MemoryStorage(), stop)
    with CheckpointManager(where) as manager:
        saved = layouts(manager.restore_or_initialize(tensors())[0])
    assert saved == layouts(train(MemoryStorage(), stop))
    assert saved[0][0] == ([0, 1] if stop == 3 else [1, 0])
    assert layouts(train(where, 5)) == layouts(whole)


def test_a_product_depends_on_the_order() -> None:
    """Negative control."""
    torch.manual_seed(0)
    one, other = torch.randn(64, 64).mT, torch.randn(64)
    assert not torch.equal(one @ other, one.contiguous() @ other)
