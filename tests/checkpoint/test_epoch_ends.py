"""A save in the last iteration of an epoch and one after its loop are one step; both resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perdure import CheckpointManager
from perdure.checkpoint import load_checkpoint
from perdure.errors import StepExistsError
from perdure.store import MemoryStorage
from perdure.torch import ResumableLoader

EPOCHS, BATCHES = 2, 4


class Killed(Exception):
    """The end of an attempt."""


def train(
    directory: Path, killed: str = "", *, schedules: bool = False, **options: Any
) -> tuple[list[bytes], list[str]]:
    """Saves every second batch and after each epoch, whose evaluation draws a random number.

    With `schedules`, what follows the loop changes the state. Returns the bits at the end, and what
    was done.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = TensorDataset(torch.arange(24.0).reshape(8, 3))
    loader = ResumableLoader(DataLoader(data, 2, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    done: list[str] = []

    def did(what: str) -> None:
        done.append(what)
        if what == killed:
            raise Killed

    try:
        with CheckpointManager(directory, save_interval_steps=2, **options) as manager:
            state, _ = manager.restore_or_initialize(state)
            for epoch in range(loader.epoch, EPOCHS):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    manager.save(loader.step, state)
                    did(f"step {loader.step}")
                torch.rand(1)
                if schedules:
                    scheduler.step()
                did(f"evaluation {epoch}")
                manager.save(loader.step, state, {"epoch": epoch}, force=True)
                did(f"epoch {epoch}")
            manager.save(loader.step, state, force=True)  # nothing has changed
    except Killed:
        pass
    values = [*model.parameters(), torch.tensor(scheduler.get_last_lr()), torch.get_rng_state()]
    return [value.detach().numpy().tobytes() for value in values], done


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # after a resume at an end
@pytest.mark.parametrize("schedules", [False, True])
def test_a_run_killed_at_the_end_of_an_epoch_ends_with_the_same_bits(
    tmp_path: Path, schedules: bool
) -> None:
    whole, all_done = train(tmp_path / "whole", schedules=schedules)
    assert len(all_done) == EPOCHS * (BATCHES + 2)
    for killed in ("step 4", "evaluation 0", "epoch 0", "epoch 1"):
        place = tmp_path / killed
        _, first = train(place, killed, schedules=schedules)
        assert first[-1] == killed
        bits, again = train(place, schedules=schedules)
        assert bits == whole
        assert again == all_done[len(all_done) - len(again) :]
        if killed in ("epoch 0", "epoch 1"):  # what follows the loop is not done twice
            assert first + again == all_done
        if killed in ("step 4", "evaluation 0"):
            assert again[0] == "evaluation 0", "no batch is trained again, and nothing is left out"
        last = load_checkpoint(place)
        assert (last["loader"]["epoch"], last["loader"]["batch"]) == (EPOCHS, 0)
        assert train(place, schedules=schedules) == (whole, [])  # finished, and saved again


def test_a_change_after_the_loop_is_refused_with_its_leaves() -> None:
    storage = MemoryStorage()
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(4.0)), 2), seed=1)
    state: dict[str, Any] = {"loader": loader, "w": np.zeros(2), "n": 0}
    with CheckpointManager(storage) as manager:
        for _ in loader:
            manager.save(loader.step, state)
        assert manager.save(loader.step, state, force=True)
        state["w"] = np.ones(2)
        with pytest.raises(StepExistsError, match=r"at w\. This process has saved step 2"):
            manager.save(loader.step, state, force=True)
    with CheckpointManager(storage) as manager:
        state, step = manager.restore_or_initialize(state)
        assert (step, loader.epoch, loader.batch, state["w"].sum()) == (2, 1, 0, 0)
        state["n"] = 1
        with pytest.raises(StepExistsError, match=r"at n\. This process has read step 2"):
            manager.save(step, state, force=True)
    with CheckpointManager(storage) as manager, pytest.raises(StepExistsError, match="recipe"):
        manager.save(step, state, force=True)  # of a process that has begun elsewhere


def test_a_checkpoint_of_a_position_after_an_epoch_is_read_as_before() -> None:
    storage = MemoryStorage()
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(4.0)), 2), seed=1)
    list(loader)
    old = {**loader.state_dict(), "order": ""}  # as earlier releases saved it
    with CheckpointManager(storage) as manager:
        manager.save(2, {"loader": old})
        manager.wait_until_finished()
        again = ResumableLoader(loader._loader, seed=1)
        state, step = manager.restore_or_initialize({"loader": again})
        assert (again.epoch, again.batch) == (1, 0)
        assert manager.save(step, state, force=True)
