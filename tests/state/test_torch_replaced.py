"""A program that goes on with the tensor from before a restore gets an error at its next save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import StateError


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
