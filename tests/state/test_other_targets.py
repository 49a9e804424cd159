"""Targets of another class or order than what was saved: refused, or kept as a whole and unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from perdure import CheckpointManager
from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state import flatten, restore, snapshot

schedulers = torch.optim.lr_scheduler
LOOSE = "ignore:.*the target and the checkpoint differ"


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((2, 3), (4, 2))]


def stepped(make: Callable[[Any], Any], given: Any = None) -> Any:
    optimizer = make(given or parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class Dict:
    """An object whose load updates its attributes, as PyTorch's schedulers do it."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "required"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if hasattr(self, "required"):
            state[vars(self)["required"]]


def refused(saved: Any, target: Any, match: str) -> None:
    """A restore of `saved` into `target` raises and changes nothing."""
    before = {path: bytes(leaf.data) for path, leaf in flatten(target).items()}
    with pytest.raises(StateError, match=match):
        restore(target, snapshot(saved))
    assert {path: bytes(leaf.data) for path, leaf in flatten(target).items()} == before


class Own(optim.Adam):
    """A class of the program, derived from one of PyTorch."""


CLASSES: list[tuple[Any, Any]] = [
    (optim.AdamW, optim.SGD),
    (optim.AdamW, optim.RMSprop),
    (optim.AdamW, optim.Adam),
    (optim.Adam, optim.AdamW),
    (optim.Adamax, optim.RAdam),
    (optim.SGD, Own),
]


@pytest.mark.parametrize(("old", "new"), CLASSES)
def test_another_class_of_optimizer_is_refused(old: Any, new: Any) -> None:
    saved = {"o": stepped(lambda p: old(p, lr=0.5))}
    expected = new.__mro__[new is Own].__name__
    match = rf"o: the checkpoint has a torch\.optim\..*\.{old.__name__}, expected .*\.{expected}"
    refused(saved, {"o": new(parameters(), lr=0.1)}, match)
    again = old(parameters(), lr=0.1)
    restore({"o": again}, snapshot(saved))
    assert again.param_groups[0]["lr"] == 0.5


def test_a_class_of_the_program_takes_the_state_of_the_one_that_it_is_derived_from() -> None:
    saved = snapshot({"o": stepped(lambda p: optim.Adam(p, lr=0.5))})
    restore({"o": (target := Own(parameters()))}, saved)
    assert target.param_groups[0]["lr"] == 0.5


def test_settings_that_come_and_go_are_no_other_class() -> None:
    optimizer = stepped(optim.Adam)
    schedulers.OneCycleLR(optimizer, 0.1, total_steps=9)  # adds settings to the groups
    optimizer.param_groups[0]["layer"] = 3
    leaves = snapshot({"o": optimizer})
    target = optim.Adam(parameters())
    restore({"o": target}, leaves)
    assert target.param_groups[0]["layer"] == 3
    for name in ("decoupled_weight_decay", "fused"):  # of a newer torch
        del leaves[f"o/param_groups/0/{name}"]
    restore({"o": target}, leaves)
    assert target.param_groups[0]["max_lr"] == 0.1


def step_lr(optimizer: Any) -> Any:
    return schedulers.StepLR(optimizer, 2, gamma=0.3)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.CosineAnnealingLR(o, 9),
        lambda o: schedulers.ExponentialLR(o, 0.1),
        lambda o: schedulers.ReduceLROnPlateau(o),
    ],
)
def test_another_class_of_scheduler_is_refused(make: Any) -> None:
    optimizer = optim.SGD(parameters(), 0.1)
    saved = step_lr(optimizer)
    refused({"s": saved}, {"s": make(optimizer)}, r"s: the checkpoint has a torch.*\.StepLR")
    free = schedulers.LambdaLR(optimizer, lambda _: 1.0)
    other = schedulers.MultiplicativeLR(optimizer, lambda _: 1.0)
    refused({"s": free}, {"s": other}, r"LambdaLR, expected .*\.MultiplicativeLR")


class Plain(optim.Optimizer):
    """An optimizer of a user's, with state of any shape."""

    def __init__(self, params: Any, wide: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.wide = wide

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                zeros = torch.zeros(9, 9) if self.wide else torch.zeros_like(parameter)
                self.state[parameter]["m"] = zeros


@pytest.mark.parametrize("make", [optim.Adam, lambda p: optim.SGD(p, momentum=0.9), Plain])
def test_the_order_of_groups_is_compared_by_shapes(make: Any) -> None:
    saved = {"o": stepped(make, [{"params": [p]} for p in parameters()])}
    groups = [{"params": [p]} for p in parameters()]
    refused(saved, {"o": make(groups[::-1])}, r"o/state/0/\w+: expected the shape \[4, 2\]")
    restore({"o": make(groups)}, snapshot(saved))


def test_state_of_other_shapes_is_that_of_an_optimizer_of_the_users() -> None:
    wide = stepped(lambda p: Plain(p, wide=True))
    target = Plain(parameters(), wide=True)
    restore({"o": target}, snapshot({"o": wide}))
    assert target.state[target.param_groups[0]["params"][0]]["m"].shape == (9, 9)


def test_named_parameters_are_compared_in_their_order() -> None:
    def named(names: list[str]) -> Any:
        return optim.Adam([(name, torch.nn.Parameter(torch.ones(2))) for name in names])

    saved = {"o": named(["a", "module.b"])}
    refused(saved, {"o": named(["b", "a"])}, "expected b as parameter 0, the checkpoint has a")
    restore({"o": named(["a", "b"])}, snapshot(saved))
    restore({"o": named(["x", "y"])}, snapshot(saved))  # names of a module that was renamed


class Wrapping(optim.Optimizer):
    """An optimizer around another one, with a `state_dict` of its own form."""

    def __init__(self, base: Any) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.n = base, 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.step()
        self.n += 1

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.load_state_dict(state["base"])
        self.n = state["n"]


def test_an_optimizer_with_a_state_of_its_own_form(tmp_path: Path) -> None:
    for step in (1, 2):
        with CheckpointManager(tmp_path, recipe={}) as manager:
            optimizer = Wrapping(optim.Adam(parameters()))
            state, start = manager.restore_or_initialize({"o": optimizer})
            assert (start, optimizer.n) == (step - 1, step - 1)
            stepped(lambda _, optimizer=optimizer: optimizer)
            manager.save(step, state)
    first = optimizer.base.param_groups[0]["params"][0]
    assert optimizer.base.state[first]["step"] == 2


def views(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    module = torch.nn.Module()
    if kind == "complex":
        numbers = torch.polar(torch.ones(3, 4), torch.rand(3, 4))
        module.register_buffer("freqs", numbers)
        module.register_buffer("cos", numbers.real)
        module.register_buffer("conjugate", numbers.conj())
        return module
    weight = torch.nn.Parameter(torch.randn(4, 3))
    module.one = weight
    if kind == "row":
        module.register_buffer("two", weight.detach()[0])
    else:
        module.two = torch.nn.Parameter(torch.empty(3, 4))
        module.two.data = weight.data.t()
    return module


@pytest.mark.parametrize("kind", ["complex", "row", "transposed"])
def test_views_that_start_where_another_tensor_starts(kind: str, tmp_path: Path) -> None:
    module = views(kind)
    with torch.no_grad():
        next(iter(module.state_dict().values())).mul_(3)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    with CheckpointManager(tmp_path, recipe={}) as manager:
        assert manager.restore_or_initialize({"m": views(kind)}).step == 0
        manager.save(1, {"m": module})
        manager.wait_until_finished()
        target = views(kind)
        manager.restore_or_initialize({"m": target})
    restored = target.state_dict()
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
    first, second, *_ = restored.values()
    assert first.data_ptr() == second.data_ptr()


def test_two_values_for_views_of_one_memory_are_refused() -> None:
    torch.manual_seed(2)
    apart = torch.nn.Module()
    apart.one, apart.two = (torch.nn.Parameter(torch.randn(s)) for s in ((4, 3), (3, 4)))
    refused({"m": apart}, {"m": views("transposed")}, "m: .*returns another")


OTHERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 5,
    "dict": lambda: {"a": 1, "step_size": [2]},
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "module": lambda: torch.nn.Linear(1, 1),
    "raises": lambda: Dict(required="b", a=1, b=2),
    "returns more": lambda: Dict(a=1, b=2, c=[3]),
    "plateau": lambda: schedulers.ReduceLROnPlateau(optim.SGD(parameters(), 0.1)),
}


@pytest.mark.filterwarnings(LOOSE)
@pytest.mark.parametrize("saved", ["scheduler", "object"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_member_of_another_class_is_kept_as_it_is(other: str, saved: str, tmp_path: Path) -> None:
    scheduler = step_lr(optim.SGD(parameters(), 0.1))
    member = scheduler if saved == "scheduler" else Dict(a=7, z=[{}, 8], gone=9)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"w": torch.ones(2), "m": member})
        manager.wait_until_finished()
        target = OTHERS[other]()
        before = copy.deepcopy(vars(target) if isinstance(target, Dict) else target)
        with pytest.warns(UserWarning, match=r"the target and the checkpoint differ[\s\S]* m[:/]"):
            restored = manager.restore(like={"w": torch.zeros(2), "m": target}, strict=False)
    assert restored.state["w"].tolist() == [1, 1]
    assert restored.state["m"] is target or other == "dict"
    assert not restored.report.is_exact
    if isinstance(target, Dict):
        assert vars(target) == before
    else:
        assert {p: bytes(leaf.data) for p, leaf in flatten({"m": target}).items()} == {
            p: bytes(leaf.data) for p, leaf in flatten({"m": before}).items()
        }


def test_a_refused_load_leaves_no_new_attribute() -> None:
    for target in (Dict(a=1, b=2, c=[3]), Dict(required="b", a=1, b=2)):
        before = copy.deepcopy(vars(target))
        refused({"m": Dict(a=7, new=9)}, {"m": target}, "m: ")
        assert vars(target) == before


@pytest.mark.filterwarnings(LOOSE)
def test_members_without_a_place_in_a_bare_module_are_ignored(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(
            1, {"model": module, "opt": optim.Adam(module.parameters()), "extra": Dict(a=[])}
        )
        manager.wait_until_finished()
        target = torch.nn.Linear(2, 2)
        before = target.weight.detach().clone()
        with pytest.raises(MismatchError):
            manager.restore(like=target, rename={"model": ""})
        assert torch.equal(target.weight, before)
        report = manager.restore(like=target, rename={"model": ""}, strict=False).report
    assert torch.equal(target.weight, module.weight)
    assert report.unexpected
    assert not report.missing


class Extra(torch.nn.Linear):
    """A module with an empty container as its extra state, which has no leaf."""

    def get_extra_state(self) -> Any:
        return {}

    def set_extra_state(self, state: Any) -> None:
        assert state == {}


def test_an_empty_container_without_a_place_is_found_before_a_change() -> None:
    first = torch.nn.Linear(2, 2)
    saved = {"a": torch.nn.Linear(2, 2), "b": Extra(2, 2)}
    refused(saved, {"a": first, "b": torch.nn.Linear(2, 2)}, "b/_extra_state: .*a dict")
    restore({"a": first, "b": Extra(2, 2)}, snapshot(saved))


def test_a_part_is_restored_into_a_module_on_the_meta_device(tmp_path: Path) -> None:
    def make(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, width))

    module = make(2)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"m": module})
        manager.wait_until_finished()
        with torch.device("meta"):
            target = make(5)
        with pytest.raises(MismatchError, match="m/1/bias"):
            manager.restore(like={"m": target}, leaves="m/**/bias")
        assert all(parameter.is_meta for parameter in target.parameters())
        manager.restore(like={"m": target}, leaves="m/0")
    assert [p.is_meta for p in target.parameters()] == [False, False, True, True]
    assert torch.equal(target.state_dict()["0.weight"], module.state_dict()["0.weight"])


@pytest.mark.parametrize("member", ["module", "optimizer", "scheduler"])
def test_what_state_dict_has_returned_is_refused_at_the_start(tmp_path: Path, member: str) -> None:
    """After a restart the dict would have the restored values, and its owner fresh ones."""
    module = torch.nn.Linear(2, 2)
    optimizer = optim.Adam(module.parameters())
    owners: dict[str, Any] = {
        "module": module,
        "optimizer": optimizer,
        "scheduler": optim.lr_scheduler.StepLR(optimizer, 3),
    }
    with CheckpointManager(tmp_path / "run", recipe={}) as manager:
        given = {"a": owners | {member: owners[member].state_dict()}}
        with pytest.raises(UnsupportedLeafError, match=f"a/{member}: .* the {member}. After"):
            manager.restore_or_initialize(given)
        # Copies are values of their own.
        best = copy.deepcopy(module.state_dict())
        assert manager.restore_or_initialize({**owners, "best": best}).step == 0


def test_the_state_dict_of_an_optimizer_in_place_of_the_optimizer() -> None:
    optimizer = optim.Adam(parameters())
    with pytest.raises(MismatchError, match="Put the optimizer itself into the state"):
        restore({"o": optimizer.state_dict()}, snapshot({"o": stepped(optim.Adam).state_dict()}))
