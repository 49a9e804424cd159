"""A restore gives an optimizer the memory that was loaded, and nobody else uses that memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import perdure
from perdure.errors import MismatchError
from perdure.state import flatten, restore
from perdure.store import Run

ROWS = 600  # more than 256 KiB of float32 in one tensor, which is then read into pages of its own
PAGE = 4096


def trained(seed: int, optimizer_class: Any = torch.optim.Adam) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(ROWS, ROWS)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    step({"model": model, "optimizer": optimizer})
    return {"model": model, "optimizer": optimizer}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, ROWS)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def moment(state: dict[str, Any]) -> torch.Tensor:
    return state["optimizer"].state[state["model"].weight]["exp_avg"]


def bits(state: Any) -> dict[str, bytes]:
    return {path: bytes(leaf.data) for path, leaf in flatten(state).items()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    state = trained(0)
    with perdure.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
    return tmp_path / "run", bits(state)


def test_a_moment_is_in_the_memory_that_was_read(saved: tuple[Path, dict[str, bytes]]) -> None:
    run, expected = saved
    first, second = trained(1), trained(2)
    with perdure.CheckpointManager(run) as manager:
        manager.restore(1, first)
        manager.restore(1, second)
    assert moment(first).data_ptr() % PAGE == 0, "it was copied"
    assert bits(first) == bits(second) == expected
    step(first)
    assert bits(first) != expected
    assert bits(second) == expected, "two restores share memory"


def test_leaves_of_the_caller_stay_his(saved: tuple[Path, dict[str, bytes]]) -> None:
    """`restore` may be called twice with the same leaves, and with those of a live state."""
    run, expected = saved
    source, first, second = trained(0), trained(1), trained(2)
    for leaves in (Run(run).load(1).leaves, flatten(source)):
        restore(first, leaves)
        step(first)
        restore(second, leaves)
        assert bits(second) == expected
    assert bits(source) == expected


class Doubled(torch.optim.Adam):
    """Writes into the arrays of the state that it is given."""

    def load_state_dict(self, state_dict: Any) -> None:
        for entry in state_dict["state"].values():
            entry["exp_avg"].mul_(2)
        super().load_state_dict(state_dict)


def test_an_optimizer_that_changes_what_it_is_given_is_found(
    saved: tuple[Path, dict[str, bytes]],
) -> None:
    """In memory that it shared with the checkpoint, the change would be compared with itself."""
    target = trained(1, Doubled)
    with (
        perdure.CheckpointManager(saved[0]) as manager,
        pytest.raises(MismatchError, match="returns another"),
    ):
        manager.restore(1, target)
