"""A program that goes on with the tensor from before a restore gets an error at its next save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import StateError, UnsupportedLeafError


def test_the_buffers_of_a_module_in_a_dict_are_not_saved_stale(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"module": module, "buffers": dict(module.named_buffers())})
        module = torch.nn.BatchNorm1d(2)
        members = {"module": module, "buffers": dict(module.named_buffers())}
        state = manager.restore(like=members).state
        assert manager.save(2, state)  # equal bits until the module changes its buffers
        module(torch.ones(3, 2))
        with pytest.raises(StateError, match=r"buffers/running_mean: .*has changed the tensor"):
            manager.save(3, state)
        assert manager.save(3, members)


def test_a_tensor_that_an_optimizer_steps_is_not_saved_stale() -> None:
    w = torch.ones(3)
    optimizer = torch.optim.SGD([w], 0.5)
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.save(1, {"w": torch.zeros(3)})
        manager.wait_until_finished()
        state = manager.restore(like={"w": w}).state
        w.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(StateError, match=r"w: .*returned a new tensor"):
            manager.save(2, state)
        w = torch.ones(3, requires_grad=True)  # restored in place
        assert manager.restore(like={"w": w}).state["w"] is w


def test_programs_that_use_what_the_restore_returned_are_left_alone() -> None:
    like = {"w": torch.ones(3), "constant": torch.ones(2)}
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.save(1, {"w": torch.zeros(3), "constant": torch.ones(2)})
        manager.wait_until_finished()
        state = manager.restore(like=like).state
        like["w"].add_(1)  # memory that the program uses for something else
        state["w"].add_(1)
        manager.save(2, state)
        manager.wait_until_finished()
        state = {**manager.restore(like=like).state}
        like["w"].add_(1)
        state["w"] = state["w"] + 1
        manager.save(3, state)
        like["constant"].copy_(torch.ones(2))
        manager.save(4, state)
        manager.wait_until_finished()
        other = manager.restore(1, like=like).state  # two restores are two values
    assert other["w"].tolist() != state["w"].tolist()


def test_a_dict_of_parameters_that_the_program_goes_on_with_gives_no_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def train(rates: dict[str, torch.Tensor], stop: int, storage: MemoryStorage) -> None:
        state = {"rates": rates}
        with CheckpointManager(storage, recipe={}) as manager:
            state, start = manager.restore_or_initialize(state)
            for step in range(start, stop):
                with torch.no_grad():
                    for rate in rates.values():
                        rate.sub_(0.25)
                manager.save(step + 1, state)

    storage = MemoryStorage()
    for stop in (2, 6):
        rates: dict[str, torch.Tensor] = {"w": torch.nn.Parameter(torch.ones(2))}
        train(rates, stop, storage)
    assert rates["w"].tolist() == [-0.5, -0.5]
    assert not recwarn.list


class Adapter(torch.nn.Module):
    """A layer with an addition of low rank, in the place of the layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0
        self.added = torch.nn.Parameter(torch.full((layer.out_features, layer.in_features), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) + x @ self.added.T * (1 + self.calls % 3)


class Scaled(torch.nn.Module):
    """Has a factor outside of its `state_dict`, which every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor *= 0.9
        return x * self.factor


class Doubled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Counter:
    """A hook that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return out + self.calls / 8


def _two_phases(storages: list[MemoryStorage], stops: tuple[int, int]) -> Any:
    """Train, put an adapter and a hook into the model, and train on with a manager of its own."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 3), Scaled(), torch.nn.Linear(3, 1)
    model = torch.nn.Sequential(*layers)
    optimizer: Any = None
    for storage, stop in zip(storages, stops, strict=True):
        if optimizer is not None:
            model[0] = Adapter(layers[0])
            model[1].register_forward_hook(Counter())
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        with CheckpointManager(storage, recipe={}) as manager:
            for step in range(manager.restore_or_initialize(state).step, stop):
                optimizer.zero_grad()
                model(torch.rand(2, 3)).square().mean().backward()
                optimizer.step()
                manager.save(step + 1, state)
    kept = model[0].calls, model[1].factor, torch.get_rng_state().tolist()
    return kept, [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_layer_that_is_replaced_between_two_managers_is_trained_and_resumed(stop: int) -> None:
    whole = _two_phases([MemoryStorage(), MemoryStorage()], (3, 6))
    _two_phases(storages := [MemoryStorage(), MemoryStorage()], (3, stop))
    assert _two_phases(storages, (3, 6)) == whole
    assert _two_phases([MemoryStorage(), MemoryStorage()], (3, 5)) != whole


def test_a_layer_that_is_replaced_after_the_restore_of_a_manager_is_refused_by_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    with (
        CheckpointManager(MemoryStorage(), recipe={}) as one,
        CheckpointManager(MemoryStorage(), recipe={}) as other,
    ):
        one.restore_or_initialize({"model": model})
        model[0] = Doubled(3, 3)
        other.restore_or_initialize({"model": model})
        other.save(1, {"model": model})
        with pytest.raises(UnsupportedLeafError, match=r"model/0: is a .*Doubled, and was"):
            one.save(1, {"model": model})
        model[0] = torch.nn.Linear(3, 3)
        with pytest.raises(UnsupportedLeafError, match=r"model/0: is a .*Linear, and was"):
            other.save(2, {"model": model})


def test_saves_do_not_compute_a_weight_that_is_parametrized_between_two_managers() -> None:
    """Reading it is a step of the power iteration."""

    def trained(*, saves: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(8, 4)
        for phase in range(2):
            if phase:
                torch.nn.utils.parametrizations.spectral_norm(model[0])
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            state = {"model": model, "optimizer": optimizer}
            with CheckpointManager(MemoryStorage(), recipe={}) as manager:
                if saves:
                    manager.restore_or_initialize(state)
                for step in range(1, 4):
                    optimizer.zero_grad()
                    model(x).pow(2).mean().backward()
                    optimizer.step()
                    if saves:
                        manager.save(step, state)
        return model.state_dict()

    saved, unsaved = trained(saves=True), trained(saves=False)
    assert all(torch.equal(saved[name], unsaved[name]) for name in unsaved)
