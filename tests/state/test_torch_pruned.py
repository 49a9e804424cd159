"""Pruning that is repeated in a run, resumed after each of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from perdure import CheckpointManager
from perdure.state import attributes

EPOCHS, STEPS = 4, 3


def fresh() -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    for layer in (net[0], net[2]):
        prune.identity(layer, "weight")
    return {"net": net, "optimizer": torch.optim.Adam(net.parameters(), 0.3)}


def train(directory: Path, stop_after: int = EPOCHS * STEPS) -> list[bytes]:
    """Train to the end, or until a step is saved; the bytes of all tensors of the module."""
    with CheckpointManager(directory, recipe={}, max_to_keep=None) as manager:
        state, step = manager.restore_or_initialize(fresh())
        step = step or 0
        net, optimizer = state["net"], state["optimizer"]
        while True:
            if step and step % STEPS == 0 and step < EPOCHS * STEPS:
                prune.l1_unstructured(net[0], "weight", amount=0.25)
                prune.ln_structured(net[2], "weight", amount=1, n=2, dim=1)
            if step == stop_after:
                return [bytes(value.numpy()) for value in net.state_dict().values()]
            batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (net(batch) - batch.sum(1, keepdim=True)).square().sum().backward()
            optimizer.step()
            step += 1
            manager.save(step, state)


def ends(directory: Path) -> list[bool]:
    """For each step: whether a run that was resumed after it ends with the same bits."""
    whole = train(directory / "whole")
    results = []
    for step in range(1, EPOCHS * STEPS):
        train(directory / str(step), stop_after=step)
        results.append(train(directory / str(step)) == whole)
    return results


def test_a_resumed_run_prunes_the_same_weights(tmp_path: Path) -> None:
    assert all(ends(tmp_path))


def test_without_the_pruned_tensors_the_runs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attributes.Attributes, "restore", lambda *_: [])
    assert not all(ends(tmp_path))
