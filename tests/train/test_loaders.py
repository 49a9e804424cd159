"""A `Trainer` takes a loader with a position, continues within an epoch and begins the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from perdure import RunConfig, Trainer
from perdure.errors import DataError
from perdure.torch import ResumableLoader

EXAMPLES, STEPS, KILLED = 7, 9, 5


class StandIn:
    """A loader with the protocol of torchdata's `StatefulDataLoader`: one state, of the iterator.

    `state_dict` makes an iterator if there is none, the next iterator takes a loaded state, and an
    iterator that has ended is replaced by a fresh one.
    """

    def __init__(self, batches: int = 4) -> None:
        self.batches = batches
        self.loaded: dict[str, Any] | None = None
        self.current: Pass | None = None
        self.is_made_for_state = False

    def _make(self) -> Pass:
        state, self.loaded = self.loaded or {"yielded": 0, "finished": False}, None
        return Pass(self.batches, **state)

    def __iter__(self) -> Iterator[Any]:
        if not self.is_made_for_state or self.current is None:
            self.current = self._make()
        self.is_made_for_state = False
        if self.current.finished:
            self.current = self._make()
        return self.current

    def state_dict(self) -> dict[str, Any]:
        if self.current is None:
            self.current, self.is_made_for_state = self._make(), True
        return {"yielded": self.current.yielded, "finished": self.current.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current, self.is_made_for_state, self.loaded = None, False, dict(state)


class Pass:
    """One pass over a `StandIn`. Its length is 0 as soon as it has ended."""

    def __init__(self, batches: int, yielded: int, finished: bool) -> None:
        self.batches, self.yielded, self.finished = batches, yielded, finished

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self.yielded == self.batches:
            self.finished = True
            raise StopIteration
        self.yielded += 1
        return torch.tensor([float(self.yielded)])


def resumable() -> ResumableLoader:
    return ResumableLoader(DataLoader(torch.arange(EXAMPLES), 2, shuffle=True), seed=3)  # type: ignore[arg-type]


class Killed(Exception):
    """The end of the first attempt."""


def train(directory: Path, data: Any, size: int, killed: int = 0) -> list[float]:
    seen: list[float] = []

    def step_fn(state: Any, batch: torch.Tensor) -> Any:
        if killed and state["n"] == killed:
            raise Killed
        seen.append(float(batch.sum()))
        new = {"n": state["n"] + 1, "sum": np.float32(state["sum"] * np.float32(0.9) + seen[-1])}
        return new, {"sum": new["sum"]}

    config = RunConfig(directory, save_checkpoints_steps=2, steps_per_execution=size)
    Trainer(step_fn, {"n": 0, "sum": np.float32(0)}, data, config).train(STEPS)
    return seen


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("make", [resumable, StandIn])
def test_a_loader_continues_within_an_epoch_and_over_its_end(
    make: Any, size: int, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", make(), size)
    assert len(whole) == STEPS  # more than two epochs of four batches
    for killed in (KILLED, 8):
        place = tmp_path / str(killed)
        with pytest.raises(Killed):
            train(place, make(), size, killed)
        again = train(place, make(), size)
        assert 0 < len(again) < STEPS
        assert again == whole[-len(again) :]


def test_a_loader_without_batches_ends_the_run(tmp_path: Path) -> None:
    assert train(tmp_path, StandIn(0), 1) == []


def test_a_loader_without_a_position_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ResumableLoader"):
        train(tmp_path, DataLoader(torch.arange(EXAMPLES), 2), 1)  # type: ignore[arg-type]
