"""What a restore of many tensors costs, counted in calls, and that no code of a module is left out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from call_counts import calls
from perdure.errors import MismatchError
from perdure.state import flatten, restore, snapshot

Linear = torch.nn.Linear


def bits(state: Any) -> dict[str, bytes]:
    return {path: bytes(leaf.data) for path, leaf in flatten(state).items()}


def many(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[Linear(1, 1) for _ in range(layers)])


def test_the_calls_of_a_restore_grow_with_the_number_of_modules() -> None:
    def cost(layers: int) -> int:
        model, other = many(layers), many(layers)
        leaves = snapshot(other)
        count = calls(lambda: restore(model, leaves))
        assert bits(model) == bits(other)
        return count

    cost(2)  # imports
    assert cost(600) < 2.2 * cost(300)


def test_the_calls_of_torch_alone_grow_with_their_square() -> None:
    """Negative control: the count above would see the comparison of all names for each module."""

    def cost(layers: int) -> int:
        model = many(layers)
        values = model.state_dict()
        return calls(lambda: model.load_state_dict(values))

    assert cost(600) > 3 * cost(300)


def with_hook(register: str) -> Callable[[list[str]], torch.nn.Module]:
    def make(called: list[str]) -> torch.nn.Module:
        inner = Linear(2, 2)
        getattr(inner, register)(lambda *_: called.append(register))
        return torch.nn.Sequential(inner)

    return make


def with_method(called: list[str]) -> torch.nn.Module:
    class Noting(Linear):
        def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
            called.append("method")
            super()._load_from_state_dict(*args)

    return torch.nn.Sequential(Noting(2, 2))


def with_replaced_method(called: list[str]) -> torch.nn.Module:
    model = torch.nn.Sequential(Linear(2, 2))
    load = model.load_state_dict

    def noting(*args: Any) -> Any:
        called.append("replaced")
        return load(*args)

    model.load_state_dict = noting  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_hook("register_load_state_dict_pre_hook"),
        with_hook("register_load_state_dict_post_hook"),
        with_method,
        with_replaced_method,
    ],
)
def test_code_of_a_module_that_takes_part_in_a_load_is_called(
    make: Callable[[list[str]], torch.nn.Module],
) -> None:
    called: list[str] = []
    model, saved = make(called), make([])
    leaves = snapshot(saved)
    called.clear()
    restore(model, leaves)
    assert len(called) == 1
    assert bits(model) == bits(saved)


def test_hooks_of_torch_are_called() -> None:
    """`weight_norm` has one that converts the names of older versions."""
    model, saved = (torch.nn.Sequential(Linear(2, 2), Linear(2, 2)) for _ in range(2))
    for each in (model, saved):
        torch.nn.utils.parametrizations.weight_norm(each[0])
    hook: Any
    (hook,) = model[0]._load_state_dict_pre_hooks.values()
    called = []
    hook.hook, convert = lambda *args: called.append(convert(*args)), hook.hook
    hook.hook.__module__ = convert.__module__
    restore(model, snapshot(saved))
    assert called
    assert bits(model) == bits(saved)


def test_a_class_method_that_was_replaced_for_all_modules_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    load = torch.nn.Module.load_state_dict

    def noting(module: torch.nn.Module, *args: Any) -> Any:
        called.append(module)
        return load(module, *args)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", noting)
    model, saved = Linear(2, 2), Linear(2, 2)
    restore(model, snapshot(saved))
    assert called
    assert bits(model) == bits(saved)


def test_norms_wrappers_views_and_flags_are_restored_in_place() -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.BatchNorm1d(3), torch.nn.InstanceNorm1d(3, track_running_stats=True)
        )
        model.append(torch.nn.DataParallel(Linear(3, 3)))
        model.register_buffer("column", torch.randn(3, 2)[:, 0])
        model.register_buffer("expanded", torch.randn(1).expand(4))
        model.register_buffer("zero", torch.tensor(float(seed)))
        model[0].weight.requires_grad_(seed == 1)
        return model

    model, saved = make(1), make(3)
    live = model.state_dict(keep_vars=True)
    strides = {name: value.stride() for name, value in live.items()}
    restore(model, snapshot(saved))
    assert bits(model) == bits(saved)
    assert model[0].weight.requires_grad
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in live.items())
    assert {name: value.stride() for name, value in after.items()} == strides


def test_no_cycle_collection_interrupts_a_restore() -> None:
    state = {f"a{i}": np.full(2, i) for i in range(3000)}
    leaves = snapshot(state)
    phases: list[str] = []

    def note(phase: str, info: Any) -> None:
        phases.append(phase)

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    gc.callbacks.append(note)
    try:
        restore(state, leaves)
        during = phases.count("start")
        control = [[] for _ in range(3000)]
        after = phases.count("start") - during
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(control) == 3000
    assert during < 10  # before and after the pause; without it, one for every leaf
    assert after > 1000  # the count sees collections
    assert gc.isenabled()
    leaves.pop("a7")
    with pytest.raises(MismatchError):
        restore(state, leaves)
    assert gc.isenabled()
