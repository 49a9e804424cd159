"""One walk of a live state serves all that a save does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, ManagerOptions
from perdure.state import flatten, template_of
from perdure.state.walk import Walk


def state() -> dict[str, Any]:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return {"net": net, "optimizer": optimizer, "w": np.ones(3), "deep": [{"n": 1}, "text"]}


def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    real = Walk.__init__

    def counted(self: Walk, state: Any, *rest: Any, **options: Any) -> None:
        made.append(state)
        real(self, state, *rest, **options)

    monkeypatch.setattr(Walk, "__init__", counted)
    return made


@pytest.mark.parametrize("journal_every", [None, 1])
def test_a_save_walks_the_state_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal_every: int | None
) -> None:
    options = ManagerOptions(journal_every=journal_every)
    with CheckpointManager(tmp_path, recipe={}, options=options) as manager:
        members, _ = manager.restore_or_initialize(state())
        made = walks(monkeypatch)
        for step in range(1, 4):
            made.clear()
            manager.save(step, members)
            assert made == [members]


def test_a_call_that_saves_nothing_does_not_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, recipe={}, save_interval_steps=5) as manager:
        members, _ = manager.restore_or_initialize(state())
        manager.save(1, members)  # shows the state to the extra members once
        made = walks(monkeypatch)
        manager.save(2, members)
    assert made == []


def test_the_walk_of_a_state_gives_what_the_state_gives() -> None:
    members = state()
    walk = Walk(members)
    assert flatten(walk) == flatten(members)
    assert template_of(members).leaves == dict(zip(walk.paths, walk.specs, strict=True))
    assert list(walk.objects) == ["net", "optimizer"]
    assert [branch.path for branch in walk.branches] == ["", "deep", "deep/0"]
