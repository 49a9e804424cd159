"""What a program keeps beside a `state_dict`, or in the memory of another value."""

from __future__ import annotations

import functools
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import UnsupportedLeafError
from perdure.state.extra_members import SharedMembers


class Recent(deque[float]):
    """A deque of the program's own class, with an attribute."""

    pushed = 0


class Seen(set[int]):
    hits = 0


class Notes:
    def __init__(self) -> None:
        self.recent, self.seen = Recent(maxlen=3), Seen()


class Net(torch.nn.Module):
    """Its `state_dict` has the trained layer only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any
        self.teacher: Any
        self.layer, self.teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.teacher.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("age", torch.zeros(1))
        self.age.since = 0  # type: ignore[attr-defined]
        self.loss: Any = functools.partial(torch.nn.functional.huber_loss, delta=1.0)
        self.recent, self.seen = Recent(maxlen=3), Seen()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name.startswith("layer.")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def train(storage: MemoryStorage, last: int) -> dict[str, Any]:
    """Resume, train up to a step, and return everything that decides the next one."""
    torch.manual_seed(0)
    net, notes = Net(), Notes()
    recent, seen = Recent(maxlen=3), Seen()
    optimizer = torch.optim.SGD(net.layer.parameters(), 0.1)
    state = {"net": net, "optimizer": optimizer, "notes": notes, "recent": recent, "seen": seen}
    with CheckpointManager(storage, recipe={}) as manager:
        state, start = manager.restore_or_initialize(state)
        for step in range(start, last):
            optimizer.zero_grad()
            x = torch.full((3, 2), step + 1.0)
            loss: Any = vars(net)["loss"]
            loss(net.layer(x) + net.mean, net.teacher(x)).backward()
            optimizer.step()
            with torch.no_grad():
                net.teacher.weight.lerp_(net.layer.weight, 0.5)
                vars(net)["_buffers"]["mean"].add_(0.25)
            net.age.since += 1  # type: ignore[attr-defined]
            if step == 1:
                net.loss = functools.partial(torch.nn.functional.huber_loss, delta=0.5)
            for each in (net.recent, notes.recent, state["recent"]):
                each.append(float(step))
                each.pushed += 1
            for each in (net.seen, notes.seen, state["seen"]):
                each.add(step)
                each.hits += 2
            manager.save(step + 1, state)
    kept = [net.recent, notes.recent, state["recent"], net.seen, notes.seen, state["seen"]]
    return {
        "values": [value.tolist() for value in (*net.parameters(), *net.buffers())],
        "kept": [(type(each).__name__, list(each), vars(each)) for each in kept],
        "lengths": [net.recent.maxlen, notes.recent.maxlen, state["recent"].maxlen],
        "age": net.age.since,  # type: ignore[attr-defined]
        "delta": net.loss.keywords["delta"],
    }


def test_collections_of_the_program_and_what_a_module_leaves_out_come_back() -> None:
    whole, storage = train(MemoryStorage(), 6), MemoryStorage()
    train(storage, 3)
    assert train(storage, 6) == whole
    assert whole["kept"][0] == ("Recent", [3.0, 4.0, 5.0], {"pushed": 6})


class Views(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.row = self.one.weight.detach()[0]


class Flat(torch.optim.Optimizer):
    """Its moments are views of one tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        flat = torch.zeros(99)
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter]["m"] = flat[2 * number : 2 * number + 2]


def share_parameters(views: Views, _: Any) -> None:
    views.other.weight.data = views.one.weight.data


def show_another_row(views: Views, _: Any) -> None:
    views.row = views.one.weight.detach()[1]


def show_another_layer(views: Views, _: Any) -> None:
    views.row = views.other.weight.detach()[0]


def keep_views(_: Views, optimizer: Flat) -> None:
    optimizer.step()


def keep_the_parameter(views: Views, optimizer: Flat) -> None:
    optimizer.state[views.one.weight]["slow"] = views.one.weight.data


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (show_another_row, "v/row: is a view"),
        (show_another_layer, "v/row: is a view"),
        (keep_views, r"o/state/\d/m and o/state/\d/m share memory"),
    ],
)
def test_memory_that_the_run_begins_to_share_is_refused(
    change: Callable[[Views, Any], None], path: str
) -> None:
    views = Views()
    optimizer = Flat(views.parameters())
    state = {"v": views, "o": optimizer}
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize(state)
        manager.save(1, state)
        change(views, optimizer)
        with pytest.raises(UnsupportedLeafError, match=path):
            manager.save(2, state)


@pytest.mark.parametrize("change", [share_parameters, keep_the_parameter])
def test_tensors_that_the_run_puts_into_one_memory_are_in_one_after_a_resume(
    change: Callable[[Views, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(storage: MemoryStorage, last: int) -> list[list[float]]:
        torch.manual_seed(0)
        views = Views()
        optimizer = Flat(views.parameters())
        optimizer.state[views.one.weight]["slow"] = torch.zeros(2, 2)
        state = {"v": views, "o": optimizer}
        with CheckpointManager(storage, recipe={}) as manager:
            for step in range(manager.restore_or_initialize(state).step, last):
                if step == 1:
                    change(views, optimizer)
                with torch.no_grad():
                    views.one.weight.mul_(1.5)
                manager.save(step + 1, state)
        held = views.other.weight, optimizer.state[views.one.weight]["slow"]
        return [each.tolist() for each in held]

    whole = train(MemoryStorage(), 5)
    for stop in (1, 2, 3, 4):
        train(storage := MemoryStorage(), stop)
        assert train(storage, 5) == whole, stop
    # Control: as two tensors, one of them stays behind.
    monkeypatch.setattr(SharedMembers, "restore", lambda *_: [])
    train(storage := MemoryStorage(), 3)
    assert train(storage, 5) != whole


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer, keeps slow weights in its own state, and returns only that of the other."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.state = inner, defaultdict(dict)
        for group in inner.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter, state in self.state.items():
            state["slow"].lerp_(parameter.detach(), 0.5)


def test_a_state_that_an_optimizer_leaves_out_of_its_state_dict_comes_back() -> None:
    def train(storage: MemoryStorage, last: int) -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = Wrapping(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        state = {"model": model, "optimizer": optimizer}
        with CheckpointManager(storage, recipe={}) as manager:
            for step in range(manager.restore_or_initialize(state).step, last):
                model.zero_grad()
                model(torch.tensor([[1.0, step]])).sum().backward()
                optimizer.step()
                manager.save(step + 1, state)
        return [values["slow"].tolist() for values in optimizer.state.values()]

    train(storage := MemoryStorage(), 2)
    assert train(storage, 5) == train(MemoryStorage(), 5)


def test_classes_of_a_module_that_the_program_makes_are_its_own() -> None:
    made = types.ModuleType("made_by_a_test")
    sys.modules[made.__name__] = made
    try:
        code = "import torch\nclass Net(torch.nn.Module):\n    calls = 0\n"
        exec(code, vars(made))
        nets = [made.Net(), made.Net()]
        storage = MemoryStorage()
        for net in nets:
            with CheckpointManager(storage, recipe={}) as manager:
                if manager.restore_or_initialize({"net": net}).step == 0:
                    net.calls = 3
                    manager.save(1, {"net": net})
        assert nets[1].calls == 3
    finally:
        del sys.modules[made.__name__]


def test_memory_that_is_shared_from_the_beginning_is_resumed() -> None:
    def train(storage: MemoryStorage, last: int) -> list[float]:
        torch.manual_seed(0)
        views = Views()
        share_parameters(views, None)
        with CheckpointManager(storage, recipe={}) as manager:
            for step in range(manager.restore_or_initialize({"v": views}).step, last):
                with torch.no_grad():
                    views.one.weight.mul_(1.5)
                    views.row.add_(1)
                manager.save(step + 1, {"v": views})
        return views.other.weight.tolist()

    storage = MemoryStorage()
    train(storage, 2)
    assert train(storage, 5) == train(MemoryStorage(), 5)
