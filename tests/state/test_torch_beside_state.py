"""What PyTorch programs keep beside `state_dict`: frozen parameters, attributes, inner optimizers."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.checkpoint import saver
from perdure.errors import MismatchError, StateError
from perdure.state import beside_state, restore, snapshot
from perdure.state.beside_state import leaves_beside
from perdure.state.unsaved_attributes import UnsavedAttributes

State = dict[str, Any]


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    result = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    result[0].requires_grad_(False)
    return result


def flags(module: torch.nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


def test_a_layer_that_the_run_has_unfrozen_is_trained_after_a_resume(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"net": model()})
        state["net"][0].requires_grad_(True)
        state["net"][1].bias.requires_grad_(False)
        manager.save(1, state)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        wrapped = torch.nn.DataParallel(model())
        with pytest.warns(UserWarning, match=r"net/0/weight to True.*net/1/bias to False"):
            manager.restore_or_initialize({"net": wrapped})
        assert flags(wrapped) == [True, True, True, False]
        same = model()
        same[0].requires_grad_(True)
        same[1].bias.requires_grad_(False)
        other = model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.restore(like={"net": same})  # freezes the same
            manager.restore(like={"net": other}, leaves="net")  # parts of a checkpoint
        assert flags(same) == [True, True, True, False]
        assert flags(other) == [False, False, True, True]


class Backbone(torch.nn.Module):
    """Has a part called `module`, as wrappers have, with a layer of the name of one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)}).eval()
        self.module.requires_grad_(False)
        self.head = torch.nn.Linear(2, 2)


def test_a_part_that_is_called_as_in_a_wrapper_keeps_its_own_flags(tmp_path: Path) -> None:
    net, other = Backbone(), Backbone().requires_grad_(True)
    other.module["head"].train()
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"net": net})
        with pytest.warns(UserWarning, match="set as it was saved"):
            manager.restore(like={"net": other})
    assert flags(other) == flags(net) == [False, False, True, True]
    assert modes(other) == modes(net)


def modes(module: torch.nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def normalized() -> torch.nn.Sequential:
    inner = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    return torch.nn.Sequential(inner, torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_submodules_get_the_modes_that_they_were_saved_in(tmp_path: Path, is_wrapped: bool) -> None:
    def wrapped(module: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.DataParallel(module) if is_wrapped else module

    saved, now = normalized(), normalized()
    saved[0][0].eval()  # type: ignore[index]
    now[1].eval()
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"net": wrapped(saved)})
    with CheckpointManager(tmp_path, recipe={}) as manager:
        with pytest.warns(
            UserWarning, match=r"`training` is set.*: net/0/0 to False, net/1 to True\. To train"
        ):
            manager.restore(like={"net": now})
        assert modes(now) == modes(saved) == [True, True, False, True, True]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.restore(like={"net": now})  # has the same
            evaluated = normalized().eval()
            manager.restore(like={"net": evaluated})  # inside an evaluation
            parts = normalized()
            manager.restore(like={"net": parts}, leaves="net")
        assert not any(modes(evaluated))
        assert all(modes(parts))


def test_modes_that_were_saved_in_an_evaluation_are_left_there(tmp_path: Path) -> None:
    saved = normalized()
    with CheckpointManager(tmp_path, recipe={}) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.save(1, {"net": saved.eval()})
        now = normalized()
        now[1].eval()
        manager.restore(like={"net": now})
        assert modes(now) == [True, True, True, True, False]


LOOPS = {  # (to None, where `zero_grad` is called)
    "keeps": (False, "first"),
    "keeps, at the end": (False, "last"),
    "drops": (True, "first"),
    "drops, after the save": (True, "last"),
    "drops, before the save": (True, "before"),
}


def heads(
    run: MemoryStorage, loop: str, stop: int, look: Callable[[State], None], interval: int = 1
) -> dict[str, bytes]:
    """Trains one head or the other, so that momentum moves an idle one that has a gradient."""
    to_none, when = LOOPS[loop]
    torch.manual_seed(0)
    net = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(3))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    with CheckpointManager(run, save_interval_steps=interval, recipe={}) as manager:
        state, start = manager.restore_or_initialize({"net": net, "optimizer": optimizer})
        look(state)
        for step in range(start, stop):
            if when == "first":
                optimizer.zero_grad(set_to_none=to_none)
            # -0.0 is a gradient here, too, which a sum with 0.0 would change.
            batch = torch.tensor([[1.0 + step, -0.0]])
            (net[0](batch) + net[1 + step % 2](batch)).sum().backward()
            if step == 3:
                net[0].requires_grad_(False)
            optimizer.step()
            if when == "before":
                optimizer.zero_grad(set_to_none=to_none)
            manager.save(step + 1, state)
            if when == "last":
                optimizer.zero_grad(set_to_none=to_none)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.filterwarnings("ignore:.*has frozen other parameters")
@pytest.mark.parametrize("loop", LOOPS)
def test_an_optimizer_moves_an_idle_layer_after_a_resume_if_the_run_does(
    loop: str,
) -> None:
    given: list[int] = []

    def look(state: State) -> None:
        given.append(sum(value.grad is not None for value in state["net"].parameters()))

    whole = heads(MemoryStorage(), loop, 7, look)
    for stop in (4, 5):
        heads(run := MemoryStorage(), loop, stop, look)
        given.clear()
        assert heads(run, loop, 7, look) == whole
        assert given == [0 if LOOPS[loop][0] else 6]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_first_due_save_knows_whether_gradients_stay(
    monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    whole = heads(MemoryStorage(), loop, 7, lambda _: None)
    heads(run := MemoryStorage(), loop, 2, lambda _: None, interval=2)
    assert heads(run, loop, 7, lambda _: None, interval=2) == whole
    monkeypatch.setattr(saver, "look_at_gradients", lambda _: None)
    heads(run := MemoryStorage(), loop, 2, lambda _: None, interval=2)
    is_same = heads(run, loop, 7, lambda _: None, interval=2) == whole
    assert is_same == LOOPS[loop][0]  # the negative control


@pytest.mark.filterwarnings("ignore:.*has frozen other parameters")
@pytest.mark.parametrize(
    ("loop", "name", "instead"),
    [
        ("keeps", "give_gradients", lambda *_: None),
        ("drops, after the save", "keeps_gradients", lambda _: True),
    ],
)
def test_without_zeros_or_with_zeros_for_all_the_idle_layer_differs(
    monkeypatch: pytest.MonkeyPatch, loop: str, name: str, instead: Any
) -> None:
    """Negative control of the test above."""
    whole = heads(MemoryStorage(), loop, 7, lambda _: None)
    monkeypatch.setattr(beside_state, name, instead)
    heads(run := MemoryStorage(), loop, 5, lambda _: None)
    assert heads(run, loop, 7, lambda _: None) != whole


def test_a_second_save_of_a_step_is_no_sign_that_gradients_stay() -> None:
    value = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([value, torch.nn.Parameter(torch.ones(1))], 0.1)
    value.sum().backward()
    assert "torch/gradients" not in leaves_beside({"o": optimizer})
    assert "torch/gradients" not in leaves_beside({"o": optimizer})
    optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        assert leaves_beside({"o": optimizer})["torch/gradients"].text == '{"o":["0"]}'
    optimizer.zero_grad()
    assert "torch/gradients" not in leaves_beside({"o": optimizer})
    value.sum().backward()
    assert "torch/gradients" not in leaves_beside({"o": optimizer})


ACCUMULATING = {  # whether `zero_grad` sets to None, and when it is called
    "tail": (True, "tail"),
    "head": (True, "head"),
    "zeros": (False, "tail"),
}


def accumulating(run: MemoryStorage, loop: str, stop: int, seen: list[int]) -> dict[str, bytes]:
    """Steps after every third batch and saves after each; `seen` gets the gradients in checkpoints."""
    to_none, when = ACCUMULATING[loop]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    like = {"net": net, "optimizer": optimizer}
    with CheckpointManager(run, max_to_keep=None, recipe={}) as manager:
        state, start = manager.restore_or_initialize(like)
        for batch in range(start, stop):
            if when == "head" and batch % 3 == 0:
                optimizer.zero_grad(set_to_none=to_none)
            net(torch.tensor([[1.0 + batch, -0.5]])).sum().backward()
            if batch % 3 == 2:
                optimizer.step()
                if when == "tail":
                    optimizer.zero_grad(set_to_none=to_none)
            manager.save(batch + 1, state)
            seen.append(sum("accumulated" in name for name in leaves_beside(state)))
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.parametrize("loop", ACCUMULATING)
def test_gradients_that_no_step_has_used_are_those_of_the_save(loop: str) -> None:
    whole = accumulating(MemoryStorage(), loop, 9, seen := [])
    assert seen == [4, 4, 0] * 3
    for stop in range(1, 9):
        accumulating(run := MemoryStorage(), loop, stop, [])
        assert accumulating(run, loop, 9, []) == whole, stop
    # A job that begins between two batches of a step, and ends there.
    accumulating(run := MemoryStorage(), loop, 4, [])
    accumulating(run, loop, 5, [])
    assert accumulating(run, loop, 9, []) == whole


def test_without_accumulated_gradients_a_resume_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    whole = accumulating(MemoryStorage(), "tail", 9, [])
    monkeypatch.setattr(beside_state, "accumulated_leaves", lambda *_: {})
    accumulating(run := MemoryStorage(), "tail", 4, [])
    assert accumulating(run, "tail", 9, []) != whole
    accumulating(run := MemoryStorage(), "tail", 3, [])
    assert accumulating(run, "tail", 9, []) == whole


def test_each_process_has_the_gradients_that_it_has_accumulated() -> None:
    value = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([value], 0.1)
    state, same = {"o": optimizer}, str
    beside_state.begin_to_watch(state)
    value.sum().backward()
    leaves = leaves_beside(state, 0)
    value.sum().backward()
    leaves |= leaves_beside(state, 1)
    assert sorted(leaves) == ["process/0/accumulated/0/o", "process/1/accumulated/0/o"]
    for process, gradient in enumerate(([1.0, 1.0], [2.0, 2.0])):
        value.grad = None
        beside_state.restore_beside(state, leaves, same, "here", process)
        assert value.grad is not None
        assert value.grad.tolist() == gradient
    optimizer.step()
    assert not leaves_beside(state, 1)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.scale = 1.0
        self.name = "a"
        self.hidden = torch.zeros(2)
        self.later: Any = None
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("total", torch.zeros(2))

    def change(self, what: str) -> None:
        if what == "scale":
            self.scale *= 0.5
        elif what == "name":
            self.name = "b"
        elif what == "later":
            self.later = 3
        elif what == "hidden":
            self.hidden = self.hidden + 1
        else:
            self.get_buffer("mean").add_(1)


@pytest.mark.parametrize("what", ["scale", "name", "later", "hidden", "mean"])
def test_an_attribute_of_a_module_that_changes_is_warned_about_once(
    tmp_path: Path, what: str
) -> None:
    net: Any = torch.nn.Sequential(Module())
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"net": net})
        net[0].change(what)
        with pytest.warns(
            UserWarning, match=f"step 2: attributes of modules.*: net/0/{what}. After"
        ):
            manager.save(2, {"net": net})
        net[0].change(what)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(3, {"net": net})


def trains(net: Module) -> None:
    """Changes what a checkpoint has, what PyTorch changes itself, and what this step computes."""
    net.eval()
    net.train()
    net.total = net.get_buffer("total") + 1
    net.later = net.inner(torch.ones(1))  # has a graph: an activation
    net.hidden = torch.zeros(2)  # made again
    net.scale = float("1.0")
    net.mean = torch.zeros(2)
    net.register_forward_hook(lambda *_: None)
    net.inner.weight.data.add_(1)


def test_a_module_that_changes_only_what_is_saved_is_left_alone(tmp_path: Path) -> None:
    net = Module()
    with CheckpointManager(tmp_path, recipe={}) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 4):
            manager.save(step, {"net": net})
            trains(net)
        manager.save(4, {"net": Module()})  # another object


class WarmingUp(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().step(closure)


class Whole(WarmingUp):
    def state_dict(self) -> State:  # type: ignore[override]
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: State) -> None:  # type: ignore[override]
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(("kind", "names"), [(WarmingUp, ["o/calls"]), (Whole, [])])
def test_a_counter_of_an_optimizer_is_warned_about(kind: Any, names: list[str]) -> None:
    net, check = torch.nn.Linear(2, 1), UnsavedAttributes()
    state = {"o": kind(net.parameters())}
    torch.optim.lr_scheduler.StepLR(state["o"], 1)  # sets attributes, too
    assert check.changed(state) is None
    state["o"].step()
    note = check.changed(state) or ""
    assert [name for name in ("o/calls", "o/_opt_called") if name in note] == names


@pytest.mark.parametrize("value", [np.float64(0.5), np.zeros(3)])
def test_numbers_of_numpy_among_the_attributes_are_warned_about(value: Any) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = value.copy()

    state, check = {"net": Net()}, UnsavedAttributes()
    assert check.changed(state) is None
    state["net"].mean = value.copy()
    assert check.changed(state) is None
    state["net"].mean += 1
    assert "net/mean" in (check.changed(state) or "")


def test_the_paths_of_many_attributes_are_few_and_nothing_is_kept_alive() -> None:
    state: Any = {"net": torch.nn.ModuleList(Module() for _ in range(20))}
    gone = weakref.ref(state["net"][3])
    check = UnsavedAttributes()
    assert check.changed(state) is None
    for number in range(10, 20):
        state["net"][number].change("scale")
    assert "net/10/scale" in (note := check.changed(state) or "")
    assert "net/14/scale and 5 more" in note
    del state
    gc.collect()
    assert gone() is None


class Sharpness(torch.optim.Optimizer):
    """Steps with an optimizer of its own, as common implementations of SAM do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
        self.base.step()


class Complete(Sharpness):
    def state_dict(self) -> State:
        return {**super().state_dict(), "base": self.base.state_dict()["state"]}

    def load_state_dict(self, state_dict: State) -> None:
        raise NotImplementedError


class Shared(Sharpness):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state = self.base.state


def test_an_inner_optimizer_that_no_checkpoint_has_is_warned_about(tmp_path: Path) -> None:
    makes: list[Callable[[Any], Any]] = [Sharpness, Complete, Shared]
    for make in makes:
        net = torch.nn.Linear(1, 1)
        optimizer = make(net.parameters())
        with (
            CheckpointManager(tmp_path / make.__name__, recipe={}) as manager,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            manager.save(0, {"optimizer": optimizer})  # nothing to lose yet
            for step in (1, 2):
                net(torch.ones(1)).sum().backward()
                optimizer.step()
                if make is Sharpness or step == 1:
                    manager.save(step, {"optimizer": optimizer}, force=True)
        found = [
            str(line.message) for line in caught if "optimizer/base (SGD)" in str(line.message)
        ]
        assert len(found) == (make is Sharpness), make


def lazy() -> State:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LazyLinear(2))
    return {"optimizer": torch.optim.Adam(layers.parameters()), "net": layers}


def test_a_lazy_module_and_its_optimizer_resume_before_the_first_forward_pass() -> None:
    def train(state: State) -> None:
        state["optimizer"].zero_grad()
        state["net"](torch.ones(1, 3)).sum().backward()
        state["optimizer"].step()

    state = lazy()
    train(state)
    saved = snapshot(state)
    again = restore(lazy(), saved)
    train(state)
    train(again)
    one, other = snapshot(state), snapshot(again)
    assert one.keys() == other.keys()
    assert all(bytes(one[path].data) == bytes(other[path].data) for path in one)


def test_a_lazy_module_is_lazy_again_if_the_restore_fails() -> None:
    class Refuses:
        def state_dict(self) -> State:
            return {"n": 1}

        def load_state_dict(self, state_dict: State) -> None:
            raise ValueError("never")

    state = lazy()
    state["net"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    saved = snapshot({**state, "refuses": Refuses()})
    target = {**lazy(), "refuses": Refuses()}
    before = target["net"][0].weight.detach().clone()
    with pytest.raises(StateError, match=r"refuses.*never"):
        restore(target, saved)
    assert isinstance(target["net"][1].weight, torch.nn.UninitializedParameter)
    assert torch.equal(target["net"][0].weight, before)
    target.pop("refuses")
    assert restore(target, snapshot(state))["net"][1].weight.shape == (2, 3)


def test_a_group_that_the_run_has_added_is_to_be_added_before_the_restore() -> None:
    net = model()
    optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
    target = torch.optim.SGD(net[1].parameters(), 0.1)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    saved = snapshot({"optimizer": optimizer})
    with pytest.raises(MismatchError, match="add the group before the restore"):
        restore({"optimizer": target}, saved)
    target.add_param_group({"params": list(net[0].parameters())})
    restore({"optimizer": target}, saved)
